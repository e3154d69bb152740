"""The compiled training step of a workload, and the parameters and optimizer state that it takes."""

from __future__ import annotations

import glob
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import meshdsl as md


def stages(
    workload: md.Workload,
    plan: md.Plan,
    *,
    forward: bool = False,
    guard: bool = False,
    machine: md.Machine | str | None = None,
) -> tuple[md.Compiled, tuple[Any, ...]]:
    """The compiled training step and its argument specs, for `.graph`, `.program` and `.lower`. Needs no devices.

    With `forward=True`, the evaluation step, which has no weight update. With `guard=True`, the step of `train`, which
    changes nothing if its loss or gradient is not finite. `machine` replaces the plan's.
    """
    params, state, batch = workload.specs()
    key = (md.spec("key_word:2", "uint32"),) if key_of(workload) else ()
    if forward:
        return md.compile(workload.eval_step(), plan=plan, machine=machine), (params, batch, *key)
    compiled = md.compile(workload.train_step(guard=guard), plan=plan, donate=(0, 1), machine=machine)
    return compiled, (params, state, batch, *key)


def initialised(workload: md.Workload, mesh: md.Mesh, layout: md.Layout, key: md.Tensor) -> dict[str, Any]:
    """Initial parameters and optimizer state; each shard is created on its own device."""

    def init(key: md.Tensor) -> dict[str, Any]:
        return dict(zip(("params", "state"), workload.init(key), strict=True))  # the same paths as in the step

    return md.compile(init, mesh, layout)(key)


def state_of(workload: md.Workload, mesh: md.Mesh, layout: md.Layout, params: Any) -> Any:
    """The optimizer state of given parameters; each shard is created on its own device."""

    def init(params: Any, key: md.Tensor) -> dict[str, Any]:
        workload.init(key)  # dead code, which has all dims that the layout may name
        return {"state": workload.optimizer(workload.config).init(params)}  # the same paths as in the step

    return md.compile(init, mesh, layout)(params, md.random.key(0))["state"]


def stored(program: md.Program, layout: md.Layout, types: Sequence[Any]) -> md.Layout:
    """The layout in which parameters and optimizer state are stored as the step takes them.

    Dims that only the update splits have private names in the program. A dim that is split over a part of a mesh axis
    (`rows.inner`) is left whole.
    """
    overrides: dict[str, Mapping[str, Any]] = dict(layout.overrides)
    for v, spec in zip(program.ins, jax.tree.leaves(types[:2]), strict=False):
        cuts = [v.sharding.axes(d) for d in v.dims]
        rules = {d.name: () if "." in "".join(cut) else cut for d, cut in zip(spec.dims, cuts, strict=True)}
        if any(rules[d] != layout.axes(d) for d in rules):
            overrides[glob.escape(v.name)] = rules
    return md.Layout({d: axes for d, axes in layout.rules.items() if d != "params"}, overrides=overrides)


def key_of(workload: md.Workload) -> inspect.Parameter | None:
    """The third parameter of the loss, a random key, or None if it has only params and batch."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(workload.loss(workload.config)).parameters.values()
    return next(iter([p for p in parameters if p.kind in kinds][2:]), None)


def needs_key(workload: md.Workload) -> bool:
    """True if the loss has no default for its random key."""
    parameter = key_of(workload)
    return parameter is not None and parameter.default is parameter.empty
