"""Attention as one operation: its function, the records of it and its gradient, its blocks, and the plain formula."""

from .function import attention

__all__ = ["attention"]
