"""`md.print` and `md.callback`: give a value to the host while a program runs, shard by shard.

The equation is never removed, merged or moved before an earlier one. Each device sends its block to its host; the host
waits for the blocks of all shards, and acts on them in order. Of copies of a block, one is sent.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable
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
Call = Callable[[np.ndarray, dict[str, slice]], object]


class _Host:
    """Acts on complete values in the order in which the first device computed them.

    A device may run far ahead of the others, so the shards of a value wait for each other.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # reentrant, since a callback may call md.print
        self.order: deque[_Receiver] = deque()  # values that the first device has sent

    def add(self, receiver: _Receiver, shard: int, act: Callable[[], object]) -> None:
        with self.lock:
            receiver.acts[shard].append(act)
            if jax.process_count() > 1:  # the other shards may be elsewhere
                receiver.acts[shard].popleft()()
                return
            if shard == 0:
                self.order.append(receiver)
            while self.order and (self.order[0].complete() or len(self.order) > LATE):
                ready = [waiting.popleft() for _, waiting in sorted(self.order.popleft().acts.items()) if waiting]
                for act in ready:
                    act()


LATE = 1000  # values that wait for a shard, after which one goes without it: its device has failed
HOST = _Host()


class _Receiver:
    """Receives the operands of one print or callback: the block of each shard, and the shard's index."""

    def __init__(self, label: str, call: Call | None, block: Block):
        self.label, self.call, self.block = label, call, block
        self.counts = [-(-max(d.size, 1) // max(n, 1)) for d, n in zip(block.dims, block.sizes, strict=True)]  # shards
        self.acts: dict[int, deque[Callable[[], object]]] = defaultdict(deque)

    def complete(self) -> bool:
        return sum(bool(waiting) for waiting in self.acts.values()) == math.prod(self.counts)

    def __call__(self, x: Any, copy: Any, before: Any, *starts: Any) -> np.ndarray:
        begins = tuple(int(start) for start in starts)
        padding = any(s >= max(d.size, 1) for s, d in zip(begins, self.block.dims, strict=True))
        if int(copy) == 0 and not padding:  # the first of the devices that store this block
            HOST.add(self, self._shard(begins), self._act(np.asarray(x), begins))
        return np.zeros((), np.bool_)

    def _shard(self, starts: tuple[int, ...]) -> int:
        index = 0
        for start, n, count in zip(starts, self.block.sizes, self.counts, strict=True):
            index = index * count + (start // n if n else 0)
        return index

    def _act(self, x: np.ndarray, starts: tuple[int, ...]) -> Callable[[], object]:
        """Print the shard, or call the function with it. `starts`: the shard's first index along each dim."""
        ends = [min(s + n, d.size) for s, n, d in zip(starts, self.block.sizes, self.block.dims, strict=True)]
        real = x[tuple(slice(0, max(0, e - s)) for s, e in zip(starts, ends, strict=True))]
        if self.call is not None:
            names = [d.name for d in self.block.dims]
            part = dict(zip(names, map(slice, starts, ends), strict=True))
            return functools.partial(self.call, real.copy(), part)
        parts = [
            f" {d.name}[{s}:{e}]"
            for d, s, e, axes in zip(self.block.dims, starts, ends, self.block.axes, strict=True)
            if axes
        ]
        text = np.array2string(real, threshold=20, precision=4)
        line = f"{self.label}{''.join(parts)}: {x.dtype.name}{show(self.block.dims)} {text}"
        return functools.partial(builtins.print, line, flush=True)


@functools.lru_cache(maxsize=1024)
def _receiver(site: object, label: str, call: Call | None, block: Block) -> _Receiver:
    return _Receiver(label, call, block)


def _kernel(c: Local, x: Any, *before: Any, label: str, site: object, call: Call | None = None, axes: Axes = ()) -> Any:
    block = c.ins[0]
    split = {axis for own, n in zip(block.axes, block.sizes, strict=True) if n for axis in own}
    copies = tuple(axis for axis in axes if axis not in split)  # copies of a block, and of an empty one
    copy = c.index(copies) if copies else 0
    starts = [c.start(block, d) for d in block.dims]
    return x, c.xp.tell_host(_receiver(site, label, call, block), x, copy, before, *starts)


PRINT = Op(
    "print",
    type=lambda x, *before, label, site, call=None, axes=(): (x, Type((), np.dtype(bool))),
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


def callback(x: Any, function: Call) -> Tensor:
    """The same tensor; whenever the program computes it, the host calls `function(block, part)` for each shard.

    `block` is a NumPy array with the dims of x in order, a copy without padding; `part` has its indices along each dim.
    Replicas of a block are passed once; a partial sum is reduced first. Calls keep their order, also in loops and
    branches, and are never removed, like those of `md.print`.

    >>> import meshdsl as md
    >>> got = []
    >>> y = md.callback(md.tensor([1.0, 2.0], "a"), lambda block, part: got.append((part, float(block.max()))))
    >>> got
    [({'a': slice(0, 2, None)}, 2.0)]

    What the function returns is not read. It must not run programs on these devices, which wait for it. An exception in
    it ends the program with an error of JAX. With several processes, each calls it for the shards of its devices.
    Raises `ShapeError` if it is not a function of two arguments.
    """
    if not callable(function):
        raise ShapeError(f"md.callback calls a function with each shard; got {function!r}")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ShapeError(f"md.callback calls its function as function(block, part): {error}") from None
    except ValueError:
        pass  # a function of C, whose arguments are not known
    return bind(PRINT, as_tensor(x), label="", call=function, site=object())[0]
