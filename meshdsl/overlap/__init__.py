"""Overlap communication with computation over the whole step (Lancet, Jiang et al., 2024, and other plans)."""
