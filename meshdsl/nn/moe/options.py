"""The options of each router, presets for published variants, and capacity formulas.

Unknown options are errors.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

import meshdsl as md

_POLICY: tuple[Any, ...] = (None, "all", "random", "threshold")
_NORMALIZE: tuple[Any, ...] = ("none", "before", "after")
_AUX: tuple[Any, ...] = ("E2_mean", "paper", "none")
_NUMBER, _INTEGER = "a number from 0", "an integer from 0"
_GIVEN = object()  # any tensor

# ROUTERS: the options of each router and their defaults. _VALUES: the allowed values of each option.
_TOP2 = {"policy": None, "threshold": 0.5, "normalize": "before"}
# fmt: off
ROUTERS: Mapping[str, Mapping[str, Any]] = {
    "gshard_paper": {**_TOP2, "rejected_second_uses_slot": True, "aux_scale": "paper"},
    "top2": {**_TOP2, "rejected_second_uses_slot": False, "aux_scale": "E2_mean"},
    "switch": {"aux_scale": "E2_mean"},
    "top_k": {
        "k": 2, "normalize": "none", "aux_scale": "E2_mean", "bias": None, "groups": 1, "best_groups": 1, "scale": 1.0,
    },
    "batch_prioritised": {"k": 1, "score": "top1", "normalize": "none", "aux_scale": "E2_mean"},
    "expert_choice": {},
    "hash": {"token_ids": None, "table": None},
    "random": {"ids": None},
}
# fmt: on
_VALUES: Mapping[str, Any] = {
    "policy": _POLICY,
    "normalize": _NORMALIZE,
    "aux_scale": _AUX,
    "score": ("top1", "sum"),
    "rejected_second_uses_slot": (False, True),
    "threshold": _NUMBER,
    "k": _INTEGER,
    "bias": _GIVEN,
    "groups": _INTEGER,
    "best_groups": _INTEGER,
    "scale": _NUMBER,
    "token_ids": _GIVEN,
    "table": _GIVEN,
    "ids": _GIVEN,
}


@dataclass(frozen=True)
class Preset:
    """A published variant: its router, its options, its capacity formula, and how `md.nn.moe_layer` computes its gates.

    `scoring` is "softmax" or "sigmoid"; if `biased`, a parameter `gate_bias` is the router's option `bias`.

    >>> import meshdsl as md
    >>> preset = md.nn.moe.PRESETS["tutel"]
    >>> preset.router, dict(preset.options), preset.capacity
    ('top_k', {'k': 2, 'normalize': 'before'}, 'tutel')
    """

    router: str
    capacity: str
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    scoring: str = "softmax"
    biased: bool = False


PRESETS: Mapping[str, Preset] = {
    # GShard (Lepikhin et al., 2020), Algorithm 1
    "gshard": Preset("gshard_paper", "paper"),
    # Mesh-TensorFlow's moe.py: a rejected second choice takes no slot; weights normalised before the capacity limit
    "mesh_tf": Preset("top2", "mesh_tf", {"normalize": "before", "threshold": 0.2}),
    # DeepSpeed's top2gating, without noise on the second choice: weights normalised over the choices that got a slot
    "deepspeed": Preset("top2", "deepspeed", {"policy": "all", "normalize": "after"}),
    # DeepSpeed's top1gating
    "deepspeed_top1": Preset("switch", "deepspeed"),
    # Tutel's default gate: top 2, normalised before the capacity limit
    "tutel": Preset("top_k", "tutel", {"k": 2, "normalize": "before"}),
    # Tutel with batch_prioritized_routing: tokens ordered by their largest probability
    "tutel_prioritised": Preset("batch_prioritised", "tutel", {"k": 2, "normalize": "before"}),
    # Switch Transformer (Fedus et al., 2021), section 2
    "switch_transformer": Preset("switch", "switch"),
    # Lancet (Jiang et al., 2024): Switch gates, and batch-prioritised gates
    "lancet": Preset("switch", "switch"),
    "lancet_prioritised": Preset("batch_prioritised", "switch", {"k": 1}),
    # V-MoE (Riquelme et al., 2021), section 4: raw probabilities, tokens ordered by their largest
    "v_moe": Preset("batch_prioritised", "paper", {"k": 2, "normalize": "none"}),
    # Mixtral (Jiang et al., 2024), section 2.2: the softmax over the best two, and no token is dropped
    "mixtral": Preset("top_k", "all", {"k": 2, "normalize": "before"}),
    # DeepSeek-V3 (2024), section 2.1.2: sigmoids, a bias for the choice alone, the best eight of the best four groups
    "deepseek_v3": Preset(
        "top_k", "all", {"k": 8, "normalize": "before", "groups": 8, "best_groups": 4, "scale": 2.5}, "sigmoid", True
    ),
}


def resolve(router: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The router's name and all its options, given the name of a router or a preset and the options to override.

    Raises `ShapeError` for an unknown router, option or value, with the closest known name.
    """
    preset = PRESETS.get(router) if isinstance(router, str) else None
    if preset is not None:
        router, options = preset.router, {**preset.options, **options}
    if not isinstance(router, str) or router not in ROUTERS:
        raise md.ShapeError(
            f"unknown router {router!r}; {suggest(str(router), [*ROUTERS, *PRESETS])}known: {', '.join(ROUTERS)}\n"
            f"  presets: {', '.join(PRESETS)}"
        )
    known = ROUTERS[router]
    for name, value in options.items():
        if name not in known:
            known_options = f"its options are: {', '.join(known)}" if known else "it has no options"
            raise md.ShapeError(f"the router {router!r} has no option {name!r}; {suggest(name, known)}{known_options}")
        allowed = _VALUES[name]
        if isinstance(allowed, tuple) and value not in allowed:
            shown = ", ".join(repr(v) for v in allowed if v is not None)
            raise md.ShapeError(f"the router option {name!r} must be one of {shown}; got {value!r}")
        if allowed in (_NUMBER, _INTEGER) and not _is_number(value, integer=allowed is _INTEGER):
            raise md.ShapeError(f"the router option {name!r} must be {allowed}; got {value!r}")
    return router, {**known, **options}


def _is_number(value: object, integer: bool = False) -> bool:
    """True if the value is a number (or an integer if `integer`) of at least 0; false for NaN and booleans."""
    kinds = int | np.integer if integer else int | float | np.integer | np.floating
    return isinstance(value, kinds) and not isinstance(value, bool) and bool(value >= 0)


def choices_of(router: str, options: Mapping[str, Any]) -> int:
    """The number of experts that each token chooses, for a router and its options as `resolve` returns them."""
    return 2 if router in ("gshard_paper", "top2") else options.get("k", 1)


def suggest(name: str, known: Iterable[str]) -> str:
    """The text "did you mean 'x'? " for the closest known name, or an empty text."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def check_known(what: str, name: str, known: Iterable[str]) -> None:
    """Raise `ShapeError`, with the closest name, unless a name is known."""
    known = list(known)
    if name not in known:
        raise md.ShapeError(f"unknown {what} {name!r}; {suggest(name, known)}known: {', '.join(known)}")


def _paper(tokens: int, experts: int, k: int, factor: float) -> int:
    return math.ceil(factor * k * tokens / experts)


# Each formula: the slots of one expert for one group of `tokens`, and its default minimum.
_CAPACITY: Mapping[str, tuple[Any, int]] = {
    "paper": (_paper, 1),
    "mesh_tf": (lambda s, e, k, f: min(s, int(s * f / e)), 4),
    "deepspeed": (_paper, 4),
    "tutel": (lambda s, e, k, f: k * int(f * math.ceil(s / e)), 1),
    "switch": (lambda s, e, k, f: int(f * math.ceil(s / e)), 1),
    "all": (lambda s, e, k, f: s, 1),
}


def capacity_of(
    tokens: int, experts: int, *, factor: float = 1.0, k: int = 2, formula: str = "paper", minimum: int | None = None
) -> int:
    """The number of slots that each expert has for one group of tokens; at most `tokens`.

    >>> from meshdsl.nn.moe import capacity_of
    >>> capacity_of(128, 8), capacity_of(128, 8, factor=2.0, formula="mesh_tf"), capacity_of(24, 16, formula="switch")
    (32, 32, 2)

    The `formula` is one of these, with S tokens, E experts and the capacity factor f: "paper" ceil(f k S / E) (GShard,
    where f is 1); "mesh_tf" int(f S / E), at least 4; "deepspeed" ceil(f k S / E), at least 4; "tutel"
    k int(f ceil(S / E)); "switch" int(f ceil(S / E)); "all" S, so that nothing is dropped, whatever the factor.
    `minimum` replaces the formula's minimum. If a group is processed in parts, compute the capacity from the tokens of
    the whole group. Raises `ShapeError` for an unknown formula, and for a factor or k that is not positive.
    """
    check_known("capacity formula", formula, _CAPACITY)
    if not _is_number(factor) or not 0 < factor < math.inf or k < 1 or experts < 1:
        raise md.ShapeError(
            f"capacity_of needs a positive factor, k >= 1 and experts >= 1; got {factor=}, {k=}, {experts=}"
        )
    rule, default_minimum = _CAPACITY[formula]
    return min(tokens, max(rule(tokens, experts, k, factor), default_minimum if minimum is None else minimum))


def balanced_table(frequencies: Iterable[float], experts: int) -> np.ndarray:
    """A table [token id] of experts (int32) that balances their load, for the router "hash".

    >>> from meshdsl.nn.moe import balanced_table
    >>> balanced_table([5, 4, 3, 3, 2, 1], 2).tolist()
    [0, 1, 1, 0, 1, 0]

    Assigns token ids to the expert with the lowest load so far, most frequent ids first (Roller et al., "Hash Layers",
    2021, section 3). Ties go to the lower id and the lower expert.
    """
    counts = np.asarray(list(frequencies), float)
    load, table = np.zeros(experts), np.zeros(len(counts), np.int32)
    for token in np.argsort(-counts, kind="stable"):
        table[token] = np.argmin(load)
        load[table[token]] += counts[token]
    return table
