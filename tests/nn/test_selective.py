"""`md.nn.selective_scan` equals its recurrence, whole, in parts, and under layouts."""

from __future__ import annotations

import numpy as np

import meshdsl as md

DOUBLE = md.nn.Precision("float64", "float64", "float64")
RNG = np.random.default_rng(3)
SHAPES = {
    "x": "batch:2 length:7 model:3", "steps": "batch:2 length:7 model:3", "a": "model:3 state:4",
    "b": "batch:2 length:7 state:4", "c": "batch:2 length:7 state:4", "old": "batch:2 model:3 state:4",
}  # fmt: skip


def operands() -> dict[str, md.Tensor]:
    made = {name: RNG.normal(size=[d.size for d in md.dims(text)]) for name, text in SHAPES.items()}
    made["steps"], made["a"] = np.abs(made["steps"]), -np.abs(made["a"])
    return {name: md.tensor(x, " ".join(d.name for d in md.dims(SHAPES[name]))) for name, x in made.items()}


def scan(x: md.Tensor, steps: md.Tensor, a: md.Tensor, b: md.Tensor, c: md.Tensor, old: md.Tensor) -> tuple:
    x, steps = md.prefer(x, "model"), md.prefer(steps, "model")
    return md.nn.selective_scan(x, steps, a, b, c, old, precision=DOUBLE)


def recurrence(x, steps, a, b, c, old):
    h, ys = old, []
    for t in range(x.shape[1]):
        h = np.exp(steps[:, t, :, None] * a) * h + (steps * x)[:, t, :, None] * b[:, t, None]
        ys.append(np.einsum("bms,bs->bm", h, c[:, t]))
    return np.stack(ys, 1), h


def test_scan_equals_its_recurrence_under_layouts():
    given = operands()
    expected = recurrence(*(x.numpy() for x in given.values()))
    for layout in ("", "length:a", "length:a model:b", "model:a batch:b", "state:a length:b", "model:a length:a"):
        program = md.compile(scan, "a:2 b:3", layout).program(*given.values())
        for found, wanted in zip(md.simulate(program, *given.values()), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-14)


def test_scan_in_parts_equals_the_whole():
    given = operands()
    whole, last = scan(**given)
    state, ys = given["old"], []
    for start, size in ((0, 3), (3, 1), (4, 3)):
        part = {k: md.slice(x, "length", start, size) for k, x in given.items() if k not in ("a", "old")}
        y, state = scan(**part, a=given["a"], old=state)
        ys.append(y.numpy())
    np.testing.assert_allclose(np.concatenate(ys, 1), whole.numpy(), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(state.numpy(), last.numpy(), rtol=1e-12, atol=1e-14)
