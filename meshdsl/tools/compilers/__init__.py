"""What compilers make of a program, without its hardware: the collectives that XLA sends, its time and its memory."""

from __future__ import annotations

from .aot import compile_for
from .compilation import Compilation, CompilerError
from .verify import Verification, verify

__all__ = ["Compilation", "CompilerError", "Verification", "compile_for", "verify"]
