"""`md.compile`: a function, a mesh and a layout become one SPMD program; and CPU devices to try it on."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax

from ..cost.machine import Machine
from ..cost.machine import machine as machine_named
from ..errors import LayoutError, expect
from ..layouts import Layout, MeshLike
from ..overlap.values import Overlap
from ..updates.groups import group_of
from ..updates.weight_update import WeightUpdate
from .arguments import static_names
from .compiled import Compiled
from .knobs import ShortNames, both_named
from .memory_limit import check_limit
from .pipeline import options_of
from .plan import Plan, planned


def compile(
    f: Callable[..., Any],
    mesh: MeshLike | None = None,
    layout: Layout | str | dict[str, Any] = "",
    *,
    plan: Plan | None = None,
    donate: Sequence[int] | int = (),
    static: Sequence[int | str] | int | str = (),
    weight_update: str | WeightUpdate = "replicated",
    overlap: str | Overlap = "none",
    attention_kernel: str = "auto",
    microbatches: int = 1,
    machine: Machine | str | os.PathLike[str] | None = None,
    unroll: bool = False,
    collective_steps: str = "auto",
    interleave: int = 1,
    memory_limit: float | None = None,
    strict: bool = True,
    **short: Unpack[ShortNames],
) -> Compiled:
    """Compile `f` to one SPMD program on a mesh, under a layout.

    >>> import meshdsl as md
    >>> double = md.compile(lambda x: md.sum(x * 2, "batch"), md.Mesh("rows:4"), md.Layout("batch:rows"))
    >>> double.program(md.spec("batch:8 io:2")).collectives[0].kind
    'all_reduce'

    Results equal those of `f` itself under every legal layout. `donate` lists the numbers of arguments whose memory
    the results may reuse; such arguments cannot be used afterwards, and a tensor in one of them cannot be in another
    place of the call. `static` lists arguments, by name or number, that are Python values with a hash (flags, sizes):
    each value has a program of its own.

    `weight_update` is how a training step updates a weight that several devices store. "replicated": every device
    updates its complete copy. "sharded": each device updates one shard, and the weight and its optimizer state stay
    sharded between steps (Xu et al., 2020). "auto": sharded where that is faster on `machine` (default "tpu-v5e"). A
    `md.WeightUpdate` also sets groups of devices, buckets of small tensors, and gathering again for the backward pass.
    `print(compiled.weight_update)` shows the decisions.

    `overlap` is how communication overlaps with computation. "none": as the compiler does it. A mode, such as "list"
    or "halves", which `md.Overlap` explains: by that plan. "auto": by the fastest of these plans on `machine` (default
    "tpu-v5e") that fits its memory.
    `print(compiled.overlap)` shows the plan.

    `attention_kernel` is how `md.attention` computes scores. "auto": by the fused kernel of the platform ("pallas" on
    TPUs, "cudnn" on GPUs) if it takes the case, else "blockwise", block by block in JAX, which takes every case. The
    printed program shows the choice and its reason. A kernel that is named and cannot take a case is an error.

    With `microbatches`, a step that takes this keyword argument (`workload.train_step()` does) divides its batch into
    so many parts. Under a layout that maps the dim of its layers to mesh axes, these axes are then the stages of a
    pipeline: each device computes the layers it stores, and micro-batches go from stage to stage.
    With `interleave`, each stage has so many blocks of layers, interleaved with those of the others: a shorter bubble.

    `machine` also says what `md.platform` returns to the model, for choices such as the dispatch of a mixture of
    experts; without it, this is the platform of the devices.

    `plan` is a `md.Plan`, which has mesh, layout, `weight_update`, `overlap`, `attention_kernel`, `unroll`,
    `collective_steps` and `interleave`, and sets rematerialisation and micro-batches of a step that takes them
    (`workload.train_step()` does).
    `plan.machine` is used if no `machine` is given.

    With `unroll`, loops become sequences of their layers. Steps are faster on most devices, because no value is stacked
    and sliced; compile time grows with depth. Overlap plans other than "skew" and "ticks" unroll too.

    `collective_steps` is how a collective is sent whose mesh axes are of several levels of `machine`: nodes and the
    GPUs in one, or slices and the chips in one. "auto": as one collective for each level, where the cost model says
    that this is faster; reshards are then planned by time instead of bytes, if that is faster. "always": so
    wherever it can be. "flat", and without a `machine`: as one collective. `steps` and `chunks` are short for
    `collective_steps` and `interleave`.

    With `memory_limit`, in bytes on each device, `remat` is chosen for a step that takes this keyword argument (that of
    `workload.train_step()` does): "none" if the memory predicted for `machine` (default "tpu-v5e") is within the limit,
    else the one of "collectives", "products" and "full" that fits with the fewest operations. The choice is
    `compiled.plan.remat`, for the last arguments seen. If none fits, this is a `LayoutError` with the memory of each.

    Raises `LayoutError` before anything runs: for an illegal layout, and, as `md.NoEffectError`, for options without
    effect ("sharded" where nothing can be sharded, buckets where nothing can be joined, an overlap that moves nothing,
    a machine that decides nothing). With `strict=False`, they are dropped with a `md.NoEffectWarning`, so that a sweep
    over options runs to its end.
    """
    expect("f", f, Callable)
    steps, chunks = both_named("md.compile", short, collective_steps, interleave)
    if plan is not None:
        expect("plan", plan, Plan)
        _check_alone(
            mesh=mesh is not None,
            layout=bool(layout),
            weight_update=weight_update != "replicated",
            overlap=overlap != "none",
            attention_kernel=attention_kernel != "auto",
            unroll=unroll,
            microbatches=microbatches != 1,
            steps=steps != "auto",
            chunks=chunks != 1,
        )
        machine = machine or plan.machine
    elif mesh is None:
        raise LayoutError(
            "md.compile needs a mesh, or a plan\n"
            "  for example md.compile(f, 'rows:2 cols:4', 'batch:rows'), or md.compile(f, plan=plan)"
        )
    else:
        plan = Plan(
            mesh,
            layout,
            weight_update,
            microbatches=microbatches,
            overlap=overlap,
            attention_kernel=attention_kernel,
            unroll=bool(unroll),
            steps=steps,
            chunks=chunks,
        )
    step = planned(f, plan, strict)
    cost_machine = _cost_machine(machine, plan)
    if plan.weight_update.group is not None:
        group_of(plan.mesh, plan.weight_update.group)
    fixed = static_names(step, static)
    options = options_of(plan, cost_machine, strict, check_limit(memory_limit, plan, f, strict))
    donated = (donate,) if isinstance(donate, int) else donate
    return Compiled(step, plan.mesh, plan.layout, donated, options, fixed, plan, f)


def _cost_machine(machine: Machine | str | os.PathLike[str] | None, plan: Plan) -> Machine | None:
    """The machine by whose cost options are chosen; None if nothing is left to choose."""
    if machine is None and plan.steps == "always":
        raise LayoutError(
            "steps='always' needs a machine, whose file says which mesh axes are slow\n"
            "  give it, for example machine='h100', or leave steps out"
        )
    if machine is None and not plan.needs_machine:
        return None
    return machine if isinstance(machine, Machine) else machine_named(machine or "tpu-v5e")


def _check_alone(**is_set: bool) -> None:
    """Raise `LayoutError` for options that a plan already has."""
    twice = [name for name, is_given in is_set.items() if is_given]
    if twice:
        raise LayoutError(
            f"the call has a plan and also {', '.join(twice)}, which the plan decides\n"
            f"  change the plan: plan.replace({twice[0]}=...)"
        )


def host_devices(count: int) -> list[Any]:
    """Create `count` CPU devices on this machine, to try layouts on; returns them.

    >>> import meshdsl as md
    >>> len(md.host_devices(8))
    8

    Requires that JAX has not started. Raises `LayoutError` if it has started with fewer devices.
    """
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if len(jax.devices("cpu")) < count:
            raise LayoutError(
                f"JAX has already started with {len(jax.devices('cpu'))} CPU devices, so {count} cannot be made\n"
                "  call md.host_devices before the first computation, tensor or jax.devices()"
            ) from None
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise LayoutError(f"asked for {count} CPU devices, JAX made {len(devices)}")
    return devices[:count]
