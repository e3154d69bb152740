"""Random programs, each a pure function of a seed: `Maker` adds one operation after another, of every family.

Values are small whole numbers in float64, so every sum is exact in any order, and a missing, doubled or misdirected
collective changes bits. A program of `n` operations is the program of `n + 1` without its last one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import meshdsl as md
from meshdsl.dims import Dim, Shape, names
from meshdsl.trace import Tensor
from tests.laws import INDICES

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 12]
# names that layers, passes and the partitioner would make up for dims of their own
ENDS = ["parts", "run", "run0", "run1", "rows", "window", "joined", "half", "inner", "keys", "x", "x_y"]
MADE_UP = [*(f"{d}__{end}" for d in "ab" for end in ENDS), "micro", "sums", "trip", "turn", "vmap", "packed", "other"]
LIMIT = 2.0**40  # sums of larger values may not be exact
Draw = random.Random


def whole_numbers(rng: np.random.Generator, shape: Shape, dtype: Any = "float64") -> md.Tensor:
    """A tensor of numbers from -2 to 2 without zeros, so that no product hides an error."""
    values = rng.choice([-2, -1, 1, 2], [d.size for d in shape])
    return md.tensor(values.astype(dtype), shape)


def alphabet(seed: int) -> Sequence[str]:
    """Names of dims; those of every fourth program include names that look made up."""
    rng = Draw(f"{seed} names")
    return ["a", "b", *rng.sample(MADE_UP, 5)] if rng.random() < 0.25 else "abcdefg"


def program(seed: int, ops: int, mesh: str) -> tuple[Callable[..., Any], list[md.Tensor]]:
    """A function from tensors to (loss and gradients, some of its values), and its arguments.

    Every fifth function also returns the product of its Hessian with the arguments.
    """
    rng = Draw(seed)
    letters = alphabet(seed)
    pool = [Dim(name, rng.choice(SIZES)) for name in letters[:5]]
    if rng.random() < 0.1:
        pool[0] = Dim("a", 0)
    shapes = [tuple(rng.sample(pool, rng.choice([1, 2, 2, 3]))) for _ in range(rng.choice([2, 3]))]
    numbers = np.random.default_rng(seed)
    args = [whole_numbers(numbers, shape) for shape in shapes]
    axes = list(md.Mesh(mesh).axes)

    def forward(*xs: md.Tensor) -> Any:
        maker = Maker(Draw(seed + 1), list(xs), axes, names=letters)
        for _ in range(ops):
            maker.step()
        return maker.loss(), maker.values()

    def with_gradient(*xs: md.Tensor) -> Any:
        return md.value_and_grad(forward, argnums=range(len(xs)), has_aux=True)(*xs)

    def with_products(*xs: md.Tensor) -> Any:
        def squares(*xs: md.Tensor) -> md.Tensor:
            loss, values = forward(*xs)
            return sum((md.sum(md.square(v)) for v in values if v.dtype == loss.dtype), loss)

        return with_gradient(*xs), md.jvp(md.grad(squares, argnums=range(len(xs))), xs, xs)[1]

    return with_gradient if Draw(f"{seed} products").random() < 0.8 else with_products, args


class Maker:
    """Add one random operation at a time to a list of live tensors."""

    def __init__(
        self, rng: Draw, live: list[Tensor], axes: Sequence[str], depth: int = 0, names: Sequence[str] = "abcdefg"
    ):
        self.rng = rng
        self.live = live
        self.axes = axes
        self.depth = depth
        self.names = names
        self.kinds = [name for name in dir(self) if name.startswith("op_")]
        if depth:  # a loop may hold another loop, whose dim may have the same name
            deeper = [
                "op_while",
                "op_cond",
                "op_checkpoint",
                "op_shard",
                "op_vmap",
                *(["op_scan"] if depth > 1 else []),
            ]
            self.kinds = [k for k in self.kinds if k not in deeper]

    def step(self) -> None:
        # one seed per operation: the first n operations don't depend on later ones or on how much each draws
        rng = self.rng
        self.rng = Draw(rng.getrandbits(48))
        try:
            made = getattr(self, self.rng.choice(self.kinds))(self.pick())
            self.live.append(self.bounded(made))
        finally:
            self.rng = rng

    def pick(self) -> Tensor:
        return self.rng.choice(self.live[-3:] if self.rng.random() < 0.7 else self.live)

    def dim(self, x: Tensor, empty: bool = False) -> Dim | None:
        dims = [d for d in x.dims if empty or d.size]
        return self.rng.choice(dims) if dims else None

    def index(self, i: Tensor) -> Tensor:
        """Indices in a random dtype; sometimes minus 1, so one may be -1, or the maximum of an unsigned dtype."""
        i = md.cast(i, "int32") - self.rng.choice([0, 0, 1])
        return md.cast(i, self.rng.choice(INDICES))

    def fresh(self, x: Tensor) -> str:
        return self.rng.choice([n for n in self.names if n not in names(x.dims)])

    def bounded(self, x: Tensor) -> Tensor:
        """Limit the size and the number of dims."""
        for d in x.dims:
            if d.size > 24:
                x = md.slice(x, d.name, 0, 12)
        while len(x.dims) > 4:
            x = md.sum(x, x.dims[0])
        return x

    def loss(self) -> Tensor:
        total = md.tensor(np.float64(0))
        for x in self.live[-3:]:
            total = total + md.sum(x * weights(x.dims))
        return total

    def values(self) -> list[Tensor]:
        return [self.live[-1], self.rng.choice(self.live)]

    def pair(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Two operands; the first has all dims of the second."""
        y = self.pick()
        for d in y.dims:
            there = next((e for e in x.dims if e.name == d.name), None)
            if there is not None and there.size != d.size:
                y = md.sum(y, d)
        lacking = [d for d in y.dims if d not in x.dims]
        if len(x.dims) + len(lacking) > 4:
            y, lacking = md.sum(y, lacking) if lacking else y, []
        return (md.broadcast(x, (*lacking, *x.dims)) if lacking else x), y

    def op_add(self, x: Tensor) -> Tensor:
        x, y = self.pair(x)
        return x + y if self.rng.random() < 0.5 else y - x

    def op_mul(self, x: Tensor) -> Tensor:
        x, y = self.pair(x)
        return x * md.sign(y)

    def op_double(self, x: Tensor) -> Tensor:
        return self.rng.choice([lambda: -x, lambda: 2 * x, lambda: x / 2 * 2, lambda: x + x])()

    def op_einsum(self, x: Tensor) -> Tensor:
        y = self.pick()
        for d in y.dims:
            if any(e.name == d.name and e.size != d.size for e in x.dims):
                y = md.sum(y, d)
        union = list(dict.fromkeys((*x.dims, *y.dims)))
        out = self.rng.sample(union, self.rng.randint(0, min(3, len(union))))
        return md.einsum(x, md.sign(y), out=out)

    def op_relu(self, x: Tensor) -> Tensor:
        return md.relu(x)

    def op_where(self, x: Tensor) -> Tensor:
        x, y = self.pair(x)
        return md.where(x > y, x, y)

    def op_sum(self, x: Tensor) -> Tensor:
        return md.sum(x, self.rng.sample(x.dims, self.rng.randint(0, len(x.dims))))

    def op_max(self, x: Tensor) -> Tensor:
        d = self.dim(x)
        if d is None:
            return x
        reduce = self.rng.choice([md.max, md.min])
        return x - md.stop_gradient(reduce(x, d))

    def op_prod(self, x: Tensor) -> Tensor:
        d = self.dim(x, empty=True)
        return x if d is None else x * md.prod(md.stop_gradient(md.sign(x)), d)

    def op_argmax(self, x: Tensor) -> Tensor:
        d = self.dim(x)
        return x if d is None else x + md.cast(self.rng.choice([md.argmax, md.argmin])(x, d), x.dtype)

    def op_broadcast(self, x: Tensor) -> Tensor:
        if len(x.dims) > 3:
            return x
        new = Dim(self.fresh(x), self.rng.choice(SIZES))
        at = self.rng.randint(0, len(x.dims))
        return md.broadcast(x, (*x.dims[:at], new, *x.dims[at:])) + weights((new,))

    def op_transpose(self, x: Tensor) -> Tensor:
        return md.transpose(x, self.rng.sample(x.dims, len(x.dims)))

    def op_rename(self, x: Tensor) -> Tensor:
        d = self.dim(x, empty=True)
        return x if d is None else md.rename(x, **{d.name: self.fresh(x)})

    def op_flatten(self, x: Tensor) -> Tensor:
        if len(x.dims) < 2:
            return x
        chosen = self.rng.sample(x.dims, 2)
        return md.flatten(x, chosen, self.fresh(x))

    def op_unflatten(self, x: Tensor) -> Tensor:
        d = self.dim(x)
        if d is None:
            return x
        n = self.rng.choice([k for k in range(1, d.size + 1) if d.size % k == 0])
        first = self.rng.choice([self.fresh(x), d.name])
        second = next(c for c in self.names[::-1] if c not in (*names(x.dims), first, d.name))
        return md.unflatten(x, d, [Dim(first, d.size // n), Dim(second, n)])

    def op_take(self, x: Tensor) -> Tensor:
        d = self.dim(x, empty=True)
        if d is None:
            return x
        new = Dim(self.fresh(x), self.rng.choice(SIZES))
        index = md.iota(new) * 3 % (d.size + 1)  # index d.size is out of range
        return md.take(x, self.index(index), d)

    def op_take_in_order(self, x: Tensor) -> Tensor:
        """The indices contain the dim that `take` reads over."""
        d, y = self.dim(x, empty=True), self.pick()
        if d is None:
            return x
        y = md.sum(y, [e for e in y.dims if e != d])
        order = md.argsort(y, d) if d in y.dims else md.iota(d)
        return md.take(x, self.index(order), d)

    def op_take_by_value(self, x: Tensor) -> Tensor:
        d, y = self.dim(x), self.pick()
        index = md.cast(md.abs(md.stop_gradient(y)) % 5, "int32")
        for e in y.dims:
            paired = e in x.dims and self.rng.random() < 0.5
            if e.name in names(x.dims) and not paired and (d is None or e.name != d.name):
                index = md.sum(index, e)
        if d is None or len(index.dims) + len(x.dims) > 5:
            return x
        if d.name in names(index.dims) and self.rng.random() < 0.5:
            index = md.rename(index, **{d.name: next(c for c in "hijklm" if c not in names(index.dims + x.dims))})
        return md.take(x, self.index(index), d)

    def op_one_hot(self, x: Tensor) -> Tensor:
        if len(x.dims) > 3:
            return x
        new = Dim(self.fresh(x), self.rng.choice(SIZES))
        index = md.cast(md.abs(md.stop_gradient(x)) % 7, "int32")
        return md.one_hot(index, new, x.dtype) * x

    def op_put_add(self, x: Tensor) -> Tensor:
        d = self.dim(x)
        if d is None:
            return x
        new = Dim(self.rng.choice([self.fresh(x), d.name]), self.rng.choice(SIZES))
        index = self.index(md.iota(d) % new.size)
        return md.put_add(md.broadcast(md.tensor(np.float64(1)), (new, *(e for e in x.dims if e != d))), index, x, new)

    def op_twin(self, x: Tensor) -> Tensor:
        """A value times its sign under another dim name."""
        d = self.dim(x, empty=True)
        if d is None or len(x.dims) > 3:
            return x
        y = md.sign(md.rename(x, **{d.name: self.fresh(x)}))
        return md.einsum(x, y, out=dict.fromkeys((*x.dims, *y.dims)))

    def op_concat(self, x: Tensor) -> Tensor:
        d = self.dim(x, empty=True)
        return x if d is None else md.concat([x, -x, md.slice(x, d, 0, (d.size + 1) // 2)], d.name)

    def op_slice(self, x: Tensor) -> Tensor:
        d = self.dim(x)
        if d is None:
            return x
        start = self.rng.randrange(d.size)
        stride = self.rng.choice([1, 1, 2])
        return md.slice(x, d, start, self.rng.randint(1, (d.size - start - 1) // stride + 1), stride)

    def op_pad(self, x: Tensor) -> Tensor:
        d = self.dim(x, empty=True)
        return (
            x
            if d is None
            else md.pad(x, d, self.rng.choice([0, 1, 2]), self.rng.choice([0, 1, 3]), self.rng.choice([0, 5]))
        )

    def op_move(self, x: Tensor) -> Tensor:
        d = self.dim(x, empty=True)
        if d is None:
            return x
        by = self.rng.choice([-2, 1, 3])
        return self.rng.choice([lambda: md.reverse(x, d), lambda: md.roll(x, d, by), lambda: md.shift(x, d, by)])()

    def op_cumsum(self, x: Tensor) -> Tensor:
        d = self.dim(x, empty=True)
        return x if d is None else md.cumsum(x, d, self.rng.random() < 0.5, self.rng.random() < 0.5)

    def op_sort(self, x: Tensor) -> Tensor:
        d = self.dim(x, empty=True)
        return x if d is None else md.sort(x, d)

    def op_top_k(self, x: Tensor) -> Tensor:
        d = self.dim(x)
        return x if d is None else md.top_k(x, d, Dim(self.fresh(x), self.rng.randint(1, d.size)))[0]

    def op_stack(self, x: Tensor) -> Tensor:
        return x if len(x.dims) > 3 else md.stack([x, -x, x + 1], self.fresh(x))

    def op_unstack(self, x: Tensor) -> Tensor:
        d = self.dim(x)
        return x if d is None or d.size > 5 else md.unstack(x, d)[-1]

    def op_dynamic_slice(self, x: Tensor) -> Tensor:
        d = self.dim(x)
        if d is None:
            return x
        size = self.rng.randint(1, d.size)
        start = self.index(md.abs(md.stop_gradient(md.sum(self.pick()))) % d.size)
        if self.rng.random() < 0.25:
            ends = np.iinfo(start.dtype)
            start = md.tensor(np.array(self.rng.choice([ends.min, ends.max]), start.dtype))
        y = md.dynamic_slice(x, d, start, size)
        return y if self.rng.random() < 0.5 else md.dynamic_update_slice(x, 2 * y, d, start)

    def op_prefer(self, x: Tensor) -> Tensor:
        d = self.dim(x, empty=True)
        return x if d is None else md.prefer(x, d)

    def op_shard(self, x: Tensor) -> Tensor:
        axes = [a for a in self.axes if self.rng.random() < 0.6]
        split: dict[str, list[str]] = {}
        for a in axes:
            d = self.dim(x)
            if d is not None:
                split.setdefault(d.name, []).append(a)
        return md.shard(x, split)

    def inner(self, xs: Sequence[Tensor], n: int) -> Tensor:
        """A few operations inside a body."""
        maker = Maker(self.rng, list(xs), self.axes, self.depth + 1, self.names)
        for _ in range(n):
            maker.step()
        return maker.live[-1]

    def op_scan(self, x: Tensor) -> Tensor:
        d = self.dim(x, empty=True)
        if d is None or d.size > 6:
            return x
        held, n, seed = self.pick(), self.rng.randint(1, 3), self.rng.getrandbits(48)
        start = weights([e for e in x.dims if e != d])
        stacked = self.rng.random() < 0.5

        def body(carry: Tensor, row: Tensor) -> Any:
            self.rng = Draw(seed)
            made = md.sign(self.inner([held, carry, row], n))
            shared = [e for e in made.dims if e in carry.dims]
            made = md.sum(made, [e for e in made.dims if e not in shared])
            carry = carry + made if made.dims else carry - row
            return carry, (carry if stacked else row * md.sum(made))

        carry, ys = md.scan(body, start, x, over=d, reverse=self.rng.random() < 0.5)
        return ys + carry

    def op_while(self, x: Tensor) -> Tensor:
        held, n, seed = md.stop_gradient(self.pick()), self.rng.randint(1, 3), self.rng.getrandbits(48)
        limit = self.rng.choice([3, 30, 1000])

        def more(c: tuple[Tensor, Tensor]) -> Tensor:
            return (c[1] > 0) & (md.sum(md.abs(c[0])) < limit)

        def body(c: tuple[Tensor, Tensor]) -> Any:
            self.rng = Draw(seed)
            made = md.sign(self.inner([held, c[0]], n))
            made = md.sum(made, [e for e in made.dims if e not in c[0].dims])
            return c[0] + made, c[1] - 1

        return x + md.while_loop(more, body, (md.stop_gradient(x), 4))[0]

    def op_cond(self, x: Tensor) -> Tensor:
        y, n, seed = self.pick(), self.rng.randint(1, 3), self.rng.getrandbits(48)

        def branch(a: Tensor, b: Tensor) -> Tensor:
            self.rng = Draw(seed)
            made = self.inner([a, b], n)
            return a + md.sum(made)

        p = md.sum(md.stop_gradient(y)) > self.rng.choice([-1, 0, 1])
        return md.cond(p, branch, lambda a, b: a - md.sum(b), x, y)

    def op_vmap(self, x: Tensor) -> Tensor:
        d, y, n, seed = self.dim(x, empty=True), self.pick(), self.rng.randint(1, 3), self.rng.getrandbits(48)
        if d is None:
            return x
        x = x if "v" in names(x.dims) else md.rename(x, **{d.name: "v"})
        y = md.sum(y, [e for e in y.dims if e.name == "v" and e not in x.dims])

        def one(a: Tensor, b: Tensor) -> Tensor:
            maker = Maker(Draw(seed), [a, b], self.axes, names=self.names)
            maker.kinds.remove("op_vmap")  # the dim's name is taken inside
            for _ in range(n):
                maker.step()
            return maker.live[-1]

        return md.vmap(one, over="v")(x, y)

    def op_checkpoint(self, x: Tensor) -> Tensor:
        y, n, seed = self.pick(), self.rng.randint(1, 3), self.rng.getrandbits(48)

        def part(a: Tensor, b: Tensor) -> Tensor:
            self.rng = Draw(seed)
            return self.inner([a, b], n)

        policy = self.rng.choice(["nothing", "collectives", "collectives", "names:kept", "offload"])
        return md.checkpoint(lambda a, b: md.abs(md.name(part(md.abs(a), b), "kept")), policy)(x, y)


def weights(shape: Sequence[Dim]) -> Tensor:
    """Small whole numbers that differ between elements, computed without a constant array."""
    total = md.tensor(np.float64(1))
    for k, d in enumerate(shape):
        place = md.iota(d, "float64") * (2 * k + 1) % 5 - 1.5
        total = md.broadcast(total, (*total.dims, d)) + 2 * place
    return total
