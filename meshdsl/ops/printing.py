"""`md.print`: show a value while a program runs, shard by shard.

The equation is never removed, merged or moved before an earlier one. Each device sends its block to its host; the host
waits for the blocks of all shards, and prints them in order. Copies of a block are printed once.
"""

from __future__ import annotations

import builtins
import functools
import threading
from collections import defaultdict, deque
from typing import Any

import jax
import numpy as np

from ..backend import Block, Local
from ..dims import show
from ..errors import ShapeError, caller
from ..ir import Op, Type
from ..layouts import Sharding
from ..trace import Tensor, as_tensor, bind

Axes = tuple[str, ...]


class _Console:
    """Prints complete values in the order in which the first device computed them.

    A device may run far ahead of the others, so the lines of a value wait for those of all its shards.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.order: deque[_Printer] = deque()  # values that the first device has sent

    def add(self, printer: _Printer, shard: int, line: str) -> None:
        with self.lock:
            printer.lines[shard].append(line)
            if jax.process_count() > 1:  # the other shards may be elsewhere
                builtins.print(printer.lines[shard].popleft(), flush=True)
                return
            if shard == 0:
                self.order.append(printer)
            while self.order and (self.order[0].complete() or len(self.order) > LATE):
                for _, waiting in sorted(self.order.popleft().lines.items()):
                    if waiting:
                        builtins.print(waiting.popleft(), flush=True)


LATE = 1000  # values that wait for a shard, after which one is printed without it: its device has failed
CONSOLE = _Console()


class _Printer:
    """The operands of one print: the block of each shard, and the shard's index."""

    def __init__(self, label: str, block: Block, shards: int):
        self.label, self.block, self.shards = label, block, shards
        self.lines: dict[int, deque[str]] = defaultdict(deque)

    def complete(self) -> bool:
        return sum(bool(waiting) for waiting in self.lines.values()) == self.shards

    def __call__(self, x: Any, copy: Any, before: Any, *starts: Any) -> np.ndarray:
        begins = tuple(int(start) for start in starts)
        padding = any(s >= max(d.size, 1) for s, d in zip(begins, self.block.dims, strict=True))
        if int(copy) == 0 and not padding:  # the first of the devices that store this block
            CONSOLE.add(self, self._shard(begins), self._line(np.asarray(x), begins))
        return np.zeros((), np.bool_)

    def _shard(self, starts: tuple[int, ...]) -> int:
        counts = [-(-max(d.size, 1) // max(n, 1)) for d, n in zip(self.block.dims, self.block.sizes, strict=True)]
        index = 0
        for start, n, count in zip(starts, self.block.sizes, counts, strict=True):
            index = index * count + (start // n if n else 0)
        return index

    def _line(self, x: np.ndarray, starts: tuple[int, ...]) -> str:
        ends = [min(s + n, d.size) for s, n, d in zip(starts, self.block.sizes, self.block.dims, strict=True)]
        real = x[tuple(slice(0, max(0, e - s)) for s, e in zip(starts, ends, strict=True))]
        part = " ".join(
            f"{d.name}[{s}:{e}]"
            for d, s, e, axes in zip(self.block.dims, starts, ends, self.block.axes, strict=True)
            if axes
        )
        text = np.array2string(real, threshold=20, precision=4)
        return f"{self.label}{' ' + part if part else ''}: {x.dtype.name}{show(self.block.dims)} {text}"


@functools.lru_cache(maxsize=1024)
def _printer(site: object, label: str, block: Block, shards: int) -> _Printer:
    return _Printer(label, block, shards)


def _kernel(c: Local, x: Any, *before: Any, label: str, site: object, axes: Axes = ()) -> Any:
    block = c.ins[0]
    split = {axis for own, n in zip(block.axes, block.sizes, strict=True) if n for axis in own}
    counts = [-(-d.size // n) if n else 1 for d, n in zip(block.dims, block.sizes, strict=True)]
    filled = int(np.prod([max(1, n) for n in counts]))
    copies = tuple(axis for axis in axes if axis not in split)  # copies of a block, and of an empty one
    copy = c.index(copies) if copies else 0
    starts = [c.start(block, d) for d in block.dims]
    return x, c.xp.tell_host(_printer(site, label, block, filled), x, copy, before, *starts)


PRINT = Op(
    "print",
    type=lambda x, *before, label, site, axes=(): (x, Type((), np.dtype(bool))),
    kernel=_kernel,
    vjp=lambda cts, x: (cts[0],),
    shardings=lambda eqn: (eqn.ins[0].sharding, Sharding()),
    flops=lambda *_, **__: 0,
    effects=True,
    acts=True,
)


def print(x: Any, label: str = "") -> Tensor:
    """The same tensor, printed with a label whenever the program computes it, also in loops and branches.

    >>> import meshdsl as md
    >>> y = md.print(md.tensor([1.0, 2.0], "a"), "y")
    y: float32[a=2] [1. 2.]

    In a compiled function each shard is printed with the part that it is, in order: `y a[0:1]: ...`, `y a[1:2]: ...`;
    copies are printed once, and a partial sum is summed first. Prints keep their order. The result need not be used.
    `md.simulate` prints too. What a gradient computes again (md.checkpoint, branches) is printed once; a dim of
    `md.vmap` is printed as one more dim. With several processes, each prints the shards of its devices as they arrive.
    Raises `ShapeError` for a label that is no text.
    """
    if not isinstance(label, str):
        raise ShapeError(f"the label of md.print is a text; got {label!r}")
    x = as_tensor(x)
    where = caller()
    return bind(PRINT, x, label=label or f"{where.file}:{where.line}", site=object())[0]
