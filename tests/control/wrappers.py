"""The law of wrappers: `python -m tests.control.wrappers`; its last line is JSON.

Each control function, with bodies that close over a tensor of the arguments, is called inside the transformations of
JAX: on tensors of traced arrays, and as a function of `md.jaxify` on a mesh. Results equal those of the same function
written in `jax.numpy` under the same transformation.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md
import tests.conftest  # noqa: F401 - eight CPU devices, as in the tests

SIZE = 4
Ours = Callable[[md.Tensor], md.Tensor]
Theirs = Callable[[jax.Array], jax.Array]


def powers(x: md.Tensor, s: md.Tensor) -> md.Tensor:
    return md.custom_vjp(lambda y: y * y * s, lambda y: (y * y * s, y), lambda y, ct: (ct * 2 * y * s,))(x)


def layers(x: md.Tensor, s: md.Tensor) -> md.Tensor:
    def layer(y: md.Tensor) -> md.Tensor:
        return md.sin(y * md.param("w", (), init=md.init.ones(), dtype="float64") * s)

    return md.model(lambda y: md.layers(layer, y, "layer:2"))({"w": md.ones("layer:2", "float64")}, x)


def halves(x: md.Tensor, s: md.Tensor) -> md.Tensor:
    return md.while_loop(lambda y: md.sum(y * y) > 1, lambda y: y / (2 + s * s), x, max_trips=6)


def endless(x: md.Tensor, s: md.Tensor) -> md.Tensor:
    return md.while_loop(lambda y: md.sum(y * y) > 1, lambda y: y / (2 + s * s), x)


def endless_in_jax(a: jax.Array) -> jax.Array:
    s = a.mean()
    for _ in range(6):
        a = jnp.where(jnp.sum(a * a) > 1, a / (2 + s * s), a)
    return a


# name -> the function of a tensor [n] and of its mean, which bodies close over; the same of an array; a gradient
TABLE: dict[str, tuple[Callable[[md.Tensor, md.Tensor], md.Tensor], Theirs, bool]] = {
    "cond": (lambda x, s: md.cond(s > 0, lambda y: y * s, lambda y: y - s, x),
             lambda a: jnp.where(a.mean() > 0, a * a.mean(), a - a.mean()), True),
    "switch": (lambda x, s: md.switch(md.cast(md.floor(s * 2), "int32"), [lambda y: y, lambda y: y * s, md.sin], x),
               lambda a: jnp.stack([a, a * a.mean(), jnp.sin(a)])[jnp.clip(jnp.floor(a.mean() * 2), 0, 2).astype(int)],
               True),
    "while_loop": (endless, endless_in_jax, False),
    "bounded": (halves, endless_in_jax, True),
    "scan": (lambda x, s: md.scan(lambda c, y: (c * s + y, c + md.sin(y)), s, x, over="n")[1],
             lambda a: jax.lax.scan(lambda c, y: (c * a.mean() + y, c + jnp.sin(y)), a.mean(), a)[1], True),
    "scan reversed": (lambda x, s: md.scan(lambda c, y: (c + y * s, c), s, x, over="n", reverse=True)[1],
                      lambda a: jax.lax.scan(lambda c, y: (c + y * a.mean(), c), a.mean(), a, reverse=True)[1], True),
    "accumulate": (lambda x, s: x * md.accumulate(lambda y: md.sum(y * y * s), x, 2, over="n"),
                   lambda a: a * jnp.sum(a * a * a.mean()), True),
    "associative_scan": (
        lambda x, s: md.associative_scan(lambda p, q: p * q * 2, x + s, over="n"),
        lambda a: jax.lax.associative_scan(lambda p, q: p * q * 2, a + a.mean()), True),
    "cumprod": (lambda x, s: md.cumprod(x, "n") * s, lambda a: jnp.cumprod(a) * a.mean(), True),
    "checkpoint": (lambda x, s: md.checkpoint(lambda y: md.sin(y * s))(x), lambda a: jnp.sin(a * a.mean()), True),
    "name": (lambda x, s: md.checkpoint(lambda y: md.sin(md.name(y * s, "kept")), ("kept",))(x),
             lambda a: jnp.sin(a * a.mean()), True),
    "vmap": (lambda x, s: md.vmap(lambda y: y * s + md.sin(y), over="n")(x),
             lambda a: a * a.mean() + jnp.sin(a), True),
    "vmap of cond": (lambda x, s: md.vmap(lambda y: md.cond(y > s, lambda z: z * s, md.sin, y), over="n")(x),
                     lambda a: jnp.where(a > a.mean(), a * a.mean(), jnp.sin(a)), True),
    "grad": (lambda x, s: md.grad(lambda y: md.sum(y * y * y * s))(x), lambda a: 3 * a * a * a.mean(), True),
    "value_and_grad": (lambda x, s: md.value_and_grad(lambda y: md.sum(y * y * s))(x)[1] * s,
                       lambda a: 2 * a * a.mean() ** 2, True),
    "jvp": (lambda x, s: md.jvp(lambda y: md.sin(y) * s, (x,), (x,))[1], lambda a: jnp.cos(a) * a * a.mean(), True),
    "vjp": (lambda x, s: md.vjp(lambda y: md.sin(y) * s, x)[1](x)[0], lambda a: jnp.cos(a) * a * a.mean(), True),
    "custom_vjp": (powers, lambda a: a * a * a.mean(), True),
    "layers": (layers, lambda a: jnp.sin(jnp.sin(a * a.mean()) * a.mean()), True),
    "local": (lambda x, s: md.local(lambda y: jnp.sin(y) * 2, x, out="n", split="n") * s,
              lambda a: jnp.sin(a) * 2 * a.mean(), True),
    "map": (lambda x, s: md.map(jnp.sinh, x) * s, lambda a: jnp.sinh(a) * a.mean(), True),
    "softmax": (lambda x, s: md.softmax(x * s, "n"), lambda a: jax.nn.softmax(a * a.mean()), True),
}  # fmt: skip


def total(f: Theirs) -> Theirs:
    return lambda a: jnp.sum(f(a) * jnp.arange(1.0, SIZE + 1))


def rows(f: Theirs) -> Theirs:
    """JAX's loop over the rows of a matrix, with a carry that the results enter."""

    def step(carry: jax.Array, a: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = f(a + carry * 0.1)
        return carry + y, y

    return lambda a: jax.lax.scan(step, jnp.zeros(SIZE), jnp.stack([a, a * 0.5]))[1]


# name -> the transformation of a function of one array [n], and whether it differentiates in reverse
TRANSFORMS: dict[str, tuple[Callable[[Theirs], Theirs], bool]] = {
    "eager": (lambda f: f, False),
    "jit": (jax.jit, False),
    "vmap": (lambda f: lambda a: jax.vmap(f)(jnp.stack([a, -a, a * 2])), False),
    "grad": (lambda f: jax.grad(total(f)), True),
    "jacfwd": (jax.jacfwd, False),
    "scan": (rows, False),
    "jit of grad": (lambda f: jax.jit(jax.grad(total(f))), True),
    "vmap of grad": (lambda f: lambda a: jax.vmap(jax.grad(total(f)))(jnp.stack([a, a * 2])), True),
    "jit of vmap": (lambda f: lambda a: jax.jit(jax.vmap(f))(jnp.stack([a, -a])), False),
    "checkpoint of grad": (lambda f: jax.grad(total(jax.checkpoint(f))), True),
    "grad of scan": (lambda f: jax.grad(lambda a: jnp.sum(rows(f)(a))), True),
}
MESHES = [("p:1", ""), ("p:2", "n:p"), ("p:4", "")]


def on_tensors(name: str) -> Theirs:
    """The function on tensors of arrays, outside `md.compile`."""
    ours = TABLE[name][0]

    def f(a: jax.Array) -> jax.Array:
        x = md.tensor(a, "n")
        return ours(x, md.mean(x)).array

    return f


def jaxified(name: str, mesh: str, layout: str) -> Theirs:
    """The function on a mesh, as a function of arrays."""
    ours = TABLE[name][0]
    return md.jaxify(md.compile(lambda x: ours(x, md.mean(x)), mesh, layout), md.spec(f"n:{SIZE}", "float64"))


def cases() -> list[tuple[str, str, str]]:
    """Function, transformation and how it is called; on a mesh, a loop without a bound has no derivative."""
    return [
        (name, transform, how)
        for name in TABLE
        for transform, (_, reverse) in TRANSFORMS.items()
        for how in ("tensors", *(f"{mesh} {layout}".strip() for mesh, layout in MESHES))
        if TABLE[name][2] or not (reverse or (transform == "jacfwd" and how != "tensors"))
    ]


A = np.array([0.9, -0.3, 1.7, 0.4])


def in_jax(name: str, transform: str) -> Theirs:
    """The transformed function, written in `jax.numpy`."""
    return TRANSFORMS[transform][0](TABLE[name][1])


def check(name: str, transform: str, how: str, wanted: jax.Array | None = None) -> str:
    """Compare one case; returns what is wrong, or an empty string. `wanted` is the result in JAX, if it is known."""
    mesh, _, layout = how.partition(" ")
    f = on_tensors(name) if how == "tensors" else jaxified(name, mesh, layout)
    try:
        got = TRANSFORMS[transform][0](f)(jnp.asarray(A))
    except Exception as error:
        return f"{name}, {transform}, {how}: {type(error).__name__}: {str(error).splitlines()[0][:150]}"
    wanted = jax.jit(in_jax(name, transform))(A) if wanted is None else wanted
    if got.shape != wanted.shape or not np.allclose(got, wanted, rtol=1e-10, atol=1e-12):
        return f"{name}, {transform}, {how}: {np.asarray(got).ravel()[:4]} instead of {np.asarray(wanted).ravel()[:4]}"
    return ""


def sample(count: int, seed: int) -> list[tuple[str, str, str]]:
    """Every function in turn, under transformations that are drawn."""
    rng = random.Random(seed)
    drawn = rng.sample(cases(), len(cases()))
    return sorted(drawn, key=lambda case: sum(c[0] == case[0] for c in drawn[: drawn.index(case)]))[:count]


def main() -> int:
    counts: Counter[str] = Counter()
    for case in cases():
        wrong = check(*case)
        counts["wrong" if wrong else "equal"] += 1
        if wrong:
            print(wrong, flush=True)
    print(json.dumps({"functions": len(TABLE), "transformations": len(TRANSFORMS), **counts}))
    return counts["wrong"] > 0


if __name__ == "__main__":
    sys.exit(main())
