"""Passes from program to program: bucket collectives, send only filled slots, unroll, split, reorder and fence."""
