"""The result of the TPU compiler: whether the program fits, its memory, its collectives, or its error."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ...errors import MeshdslError
from ...errors.units import show_bytes
from .diff import CompilerDiff
from .hlo import Performed
from .windows import CompiledWindow

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class CompilerError(MeshdslError, RuntimeError):
    """The compiler for another machine is not installed, does not know the topology, or failed.

    >>> import meshdsl as md
    >>> try:
    ...     md.compile_for("gpu:h100:8", md.compile(md.exp, "rows:8", "batch:rows").program(md.spec("batch:8")))
    ... except md.CompilerError as error:
    ...     print(str(error).splitlines()[0])
    a topology is written tpu:NAME:SIZES, for example tpu:v5e:4x4; got 'gpu:h100:8'
    """


@dataclass(frozen=True)
class CompiledMemory:
    """Bytes of one device, as the compiler reports them."""

    argument: int
    output: int
    temp: int
    alias: int  # outputs that reuse argument buffers
    generated_code: int
    peak: int  # most bytes live at once, including arguments and outputs
    host: int = 0  # temporaries in the host's memory, which are not in the others

    @property
    def total(self) -> int:
        """argument + output + temp - alias: the sum of the parts; exceeds the peak of programs with loops."""
        return self.argument + self.output + self.temp - self.alias


@dataclass(frozen=True)
class Compilation:
    """The result of compiling a program for a topology; `changes` lists what the compiler changed in the collectives.

    `md.compile_for` returns it. Bytes are per device, `seconds` is the compilation time. An example that does not fit,
    as the TPU v5e compiler reports it:

    >>> import meshdsl as md
    >>> made = md.Compilation("tpu:v5e:2x2", 4, "", False, 20_000_000_000, 16_909_336_576, "...", None, (), (), (), 3.0)
    >>> print(made)
    does not fit on tpu:v5e:2x2: it needs 20.00 GB of one device, 3.09 GB too many
    >>> made.fits, made.over
    (False, 3090663424)
    """

    topology: str
    devices: int
    order: str  # how mesh axes are mapped to the devices
    fits: bool
    needed: int  # bytes of one device; if the program doesn't fit, as far as the compiler reports them
    limit: int | None = None  # bytes of one device; known only if the program doesn't fit and the compiler reports it
    message: str = ""  # the compiler's error if the program doesn't fit
    memory: CompiledMemory | None = None  # None if the program doesn't fit
    collectives: tuple[Performed, ...] = ()  # of the compiled program
    changes: tuple[CompilerDiff, ...] = ()  # comparison with the program's own, by kind and mesh axes
    windows: tuple[CompiledWindow, ...] = ()  # of an overlap plan
    seconds: float = 0.0  # compilation time
    cycles: int | None = None  # the compiler's estimate of one run, without communication; None if it has none

    @property
    def over(self) -> int:
        """Bytes over the limit; 0 if the program fits."""
        return 0 if self.fits else max(0, self.needed - (self.limit or 0))

    def __str__(self) -> str:
        if not self.fits:
            over = f", {show_bytes(self.over)} too many" if self.limit is not None else ""
            return f"does not fit on {self.topology}: it needs {show_bytes(self.needed)} of one device{over}"
        assert self.memory is not None
        return (
            f"fits on {self.topology}: {show_bytes(self.memory.peak)} of one device, compiled in {self.seconds:.0f} s"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        memory = None if self.memory is None else {**vars(self.memory), "total": self.memory.total}
        lists = {name: [one.to_dict() for one in getattr(self, name)] for name in ("collectives", "changes", "windows")}
        return {**vars(self), "over": self.over, "memory": memory, **lists}


def refused(topology: str, record: dict[str, Any]) -> Compilation:
    """The result for a program that needs too much memory; raises `CompilerError` for any other error."""
    message: str = record["error"]
    if "RESOURCE_EXHAUSTED" not in message:
        raise CompilerError(f"the compiler for {topology} failed: {message[:2000]}")
    needed, limit = sizes_of(message)
    return Compilation(topology, record["devices"], record["order"], False, needed, limit, message)


def sizes_of(message: str) -> tuple[int, int | None]:
    """Bytes needed and bytes available, from the compiler's message about memory; 0 and None if it has none.

    >>> sizes_of("the total memory required for HLO temporaries (17.30G) exceeds available HBM (15.75G).")
    (18575733555, 16911433728)
    """
    sizes = [
        int(float(n) * UNITS[unit]) for n, unit in re.findall(r"(\d+(?:\.\d+)?)([KMGT]?)(?=\)| of|B? hbm)", message)
    ]
    return (sizes[0] if sizes else 0), (sizes[1] if len(sizes) > 1 else None)
