"""Random keys and the bits drawn from them: the numbers of JAX. A tensor of keys has the dim `key_word`, last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

import meshdsl as md

from ..axes import dims
from ..replay import NotImportedError, Replay, operation
from ..steps import BodyStep, Value
from ..tensors import WORD, Move, fit, fresh, full, whole


def _key(step: BodyStep, x: Any) -> md.Tensor:
    kind = str(step.ins[0].dtype)
    if "fry" not in kind:
        raise NotImportedError(f"numbers of a {kind} are not drawn here\n  make the key with jax.random.key(seed)")
    return whole(step.ins[0], x)


def _for_each(f: Callable[..., md.Tensor], over: tuple[md.Dim, ...], *xs: md.Tensor) -> md.Tensor:
    return md.vmap(f, [d for d in over if any(d in x.dims for x in xs)])(*xs) if over else f(*xs)


def _leading(v: Value, out: Value) -> list[Move]:
    return [([a], [b]) for a, b in zip(v.axes, out.axes, strict=False)]


@operation("random_wrap")
def wrap(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    v, out = step.ins[0], step.outs[0]
    words = whole(v, xs[0])
    inside = [d for d in words.dims if d in dims(v.axes[-1:])]
    return full(fit(md.rename(words, **{inside[0].name: WORD}), *_leading(v, out)), [*dims(out.axes), WORD])


@operation("random_clone")
def clone(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    return fit(_key(step, xs[0]), *_leading(step.ins[0], step.outs[0]))


@operation("random_unwrap")
def unwrap(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    v, out = step.ins[0], step.outs[0]
    x = fit(_key(step, xs[0]), *_leading(v, out))
    return md.rename(x, key_word=dims(out.axes[-1:])[0])


@operation("random_seed")
def seed(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    x = xs[0]
    if not isinstance(x, md.Tensor):
        return md.tensor(jax.random.key(int(x)))
    if step.ins[0].shape:
        raise NotImportedError(
            "an array of seeds is no operation here\n  make the keys outside, and pass them as an argument"
        )
    return md.random.key(x)


@operation("random_split")
def split(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    v, out = step.ins[0], step.outs[0]
    new = out.axes[len(v.axes) :]
    count, made = out.size // max(1, v.size), fresh(out.size // max(1, v.size), "keys")
    keys = _for_each(lambda k: md.random.split(k, made), dims(v.axes), _key(step, xs[0]))
    keys = fit(keys, *_leading(v, out), ([made], new)) if count > 1 else md.squeeze(keys, made.name)
    return full(keys, [*dims(out.axes), WORD])


@operation("random_fold_in")
def fold_in(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    v, data, out = step.ins[0], step.ins[1], step.outs[0]
    number = md.cast(whole(data, xs[1]), "uint32")
    key = fit(_key(step, xs[0]), *_leading(v, out))
    number = fit(number, *_leading(data, out))
    return full(_for_each(md.random.fold_in, dims(out.axes), key, number), [*dims(out.axes), WORD])


@operation("random_bits")
def bits(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    v, out = step.ins[0], step.outs[0]
    key = fit(_key(step, xs[0]), *_leading(v, out))
    lead, drawn = dims(out.axes[: len(v.axes)]), dims(out.axes[len(v.axes) :])
    return _for_each(lambda k: md.random.bits(k, drawn, f"uint{step.params['bit_width']}"), lead, key)
