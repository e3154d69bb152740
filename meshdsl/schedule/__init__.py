"""Passes from program to program: which collectives are joined, shortened, split and reordered."""
