"""The passes from a traced function to the program of one device, in order.

A pass takes the state of a compilation and returns the next state. The runner verifies the graph and the program after
every pass, and keeps both for `compiled.history`. To add a pass, write it in its own file and add one entry here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax

from ..cost.ledger import ledger
from ..cost.machine import Machine
from ..cost.network import Placement, place
from ..cost.timeline import timeline
from ..errors import LayoutError
from ..errors.no_effect import NoEffectError, no_effect
from ..ir import Graph, verify
from ..layouts import Layout, Mesh
from ..layouts.sharding import Axes
from ..lowering import Program
from ..lowering.check import check
from ..lowering.collective_steps import has_slow, in_steps
from ..lowering.order_prints import order_prints
from ..lowering.partition import partition
from ..lowering.partition.legality import named_by_layouts
from ..lowering.ragged_exchange import ragged_exchange
from ..lowering.unroll import unroll
from ..overlap.plan import plan_overlap
from ..overlap.values import NO_OVERLAP, Overlap, OverlapPlan
from ..passes.pipelines import Schedule, pipelined
from ..passes.simplify import simplify
from ..targets import FUSED, Target, target_named
from ..targets.kernel_choice import with_kernels
from ..updates.groups import RefinedMesh
from ..updates.parameters import of_params, stored_as_shards
from ..updates.weight_update import UpdateTable, WeightUpdate, bucket, shard
from .plan import Plan

REPLICATED, UNCHANGED, UNPLANNED = WeightUpdate(), UpdateTable("replicated"), OverlapPlan("none")


@dataclass(frozen=True)
class Options:
    """The options of `md.compile`, without the function, the mesh and the layout."""

    weight_update: WeightUpdate = REPLICATED
    unroll: bool = False
    overlap: Overlap = NO_OVERLAP
    machine: Machine | None = None  # decides in mode "auto", which collectives are in steps, and an overlap plan
    attention_kernel: str = "auto"
    platform: str = ""  # for which the kernels of attentions are chosen; "": that of JAX's default backend
    steps: str = "auto"  # how collectives over several levels of the machine's network are sent
    chunks: int = 1  # blocks of layers of each pipeline stage
    donated: tuple[int, ...] = ()  # inputs of the program whose memory its results may reuse
    strict: bool = True  # an option without effect is an error; otherwise a warning
    memory_limit: float | None = None  # bytes on each device, for which a rematerialisation is chosen


def options_of(plan: Plan, machine: Machine | None, strict: bool, memory_limit: float | None) -> Options:
    """The options that a plan sets, and these."""
    return Options(
        plan.weight_update,
        plan.unroll,
        plan.overlap,
        machine,
        plan.attention_kernel,
        steps=plan.steps,
        chunks=plan.chunks,
        strict=strict,
        memory_limit=memory_limit,
    )


@dataclass(frozen=True)
class PassState:
    """A compilation between two passes: the graph, the mesh and layout, and the program after partition."""

    graph: Graph
    layout: Layout
    results: Sequence[str]  # the paths of the results
    refined: RefinedMesh  # the user's mesh, and that of the program with the axes of update groups
    program: Program | None = None
    params: Axes = ()  # of the layout's rule for the parameters, if the function takes some
    weight_update: UpdateTable = UNCHANGED
    overlap: OverlapPlan = UNPLANNED
    schedules: tuple[Schedule, ...] = ()  # of the pipelines
    without_pipelines: PassState | None = None  # the state before them

    @property
    def mesh(self) -> Mesh:
        """The mesh of the program."""
        return self.refined.mesh


@dataclass(frozen=True)
class Pass:
    """One entry of the pipeline: its name in `history`, and a function from state to state."""

    name: str
    run: Callable[[PassState, Options], PassState]


def _decides(options: Options) -> Machine | None:
    """The machine that decides on weight updates; None unless the mode is "auto"."""
    return options.machine if options.weight_update.mode == "auto" else None


def _pipeline(state: PassState, options: Options) -> PassState:
    if state.layout.problems(state.mesh, *named_by_layouts(state.graph, state.results)):
        return state  # partition raises them all
    piped = _in_ticks(state, options)
    return dataclasses.replace(piped, without_pipelines=state) if piped.schedules else state


def _in_ticks(state: PassState, options: Options, late: bool = False) -> PassState:
    sharded = options.weight_update.mode != "replicated"
    graph, layout, schedules = pipelined(state.graph, state.mesh, state.layout, options.chunks, late, sharded)
    return dataclasses.replace(state, graph=graph, layout=layout, schedules=schedules)


def _paired(state: PassState, options: Options) -> Program:
    """The program before its overlap is planned, with one loop over layers in the ticks of its pipelines."""
    assert state.without_pipelines is not None
    state = _in_ticks(state.without_pipelines, options, late=True)
    for each in TO_PROGRAM:
        state = each.run(state, options)
    assert state.program is not None
    return state.program


def _shard_weight_updates(state: PassState, options: Options) -> PassState:
    of, update = (state.graph, state.mesh, state.layout, state.results), options.weight_update
    if update.mode == "replicated" and not state.params:
        return state
    try:
        machine = _decides(options)
        sharded = shard(*of, update, machine, options.strict, options.donated) if update.mode != "replicated" else None
    except NoEffectError:
        if not state.params:
            raise
        sharded = None  # gradients, and no update
    sharded = sharded or stored_as_shards(*of, state.params)
    return dataclasses.replace(
        state,
        graph=sharded.graph,
        layout=sharded.layout,
        refined=sharded.refined,
        program=sharded.program.replace(schedules=state.schedules) if sharded.program else state.program,
        weight_update=sharded.table,
    )


def _partition(state: PassState, options: Options) -> PassState:
    if state.program is not None:
        return state
    program = partition(state.graph, state.mesh, state.layout, state.results)
    return dataclasses.replace(state, program=program.replace(schedules=state.schedules))


def _target(options: Options) -> Target:
    """The target; where no platform is known yet, that of a kernel that is asked for. The run checks the devices."""
    kernel = FUSED.get(options.attention_kernel)
    return target_named(options.platform or (kernel.platform if kernel else "") or jax.default_backend())


def _unroll(program: Program, options: Options) -> Program:
    if not options.unroll:
        return program
    unrolled = unroll(program, stores=False)
    if unrolled is program:
        raise NoEffectError(
            "unroll=True has no effect: the program has no loop over a dim (md.scan, md.layers) with trips\n"
            "  leave unroll out"
        )
    return unrolled


def _in_steps(state: PassState, options: Options) -> PassState:
    machine, mesh = options.machine, state.refined.coarse
    if options.steps == "flat" or machine is None:
        return state
    try:
        placement = state.refined.placement(place(machine.network, mesh))
    except LayoutError:
        if options.steps == "auto":  # the machine decides something else: of a mesh that it lacks, no axis is slow
            return state
        raise
    assert state.program is not None
    if options.steps == "always":
        return dataclasses.replace(state, program=in_steps(state.program, "always", machine.name, placement))
    flat = [state.program]
    if has_slow(state.program, placement):
        flat.append(_planned_by_time(state, options, placement))
    programs = dict.fromkeys(each for one in flat for each in (one, in_steps(one, "auto", machine.name, placement)))
    if len(programs) > 1:
        program = min(programs, key=lambda each: timeline(ledger(each), machine, placement).seconds)
        state = dataclasses.replace(state, program=program)
    return state


def _planned_by_time(state: PassState, options: Options, placement: Placement) -> Program:
    """The program before steps, with reshards planned by time; as it is if buckets then have no effect."""
    program = partition(state.graph, state.mesh, state.layout, state.results, seconds=placement.seconds)
    by_time = dataclasses.replace(state, program=program.replace(schedules=state.schedules))
    try:
        for each in AFTER_PARTITION:
            by_time = each.run(by_time, options)
    except NoEffectError:
        return state.program or program
    assert by_time.program is not None
    return by_time.program


def _plan_overlap(state: PassState, options: Options) -> PassState:
    if options.overlap.mode == "none":
        return state
    assert state.program is not None and options.machine is not None
    placement = state.refined.placement(place(options.machine.network, state.refined.coarse))
    paired = None
    if state.schedules and not options.unroll and all(each.microbatches > 1 for each in state.schedules):
        paired = partial(_paired, state, options)
    program, plan = plan_overlap(state.program, options.overlap, options.machine, placement, options.donated, paired)
    return dataclasses.replace(state, program=program, overlap=plan)


def _on_program(
    transform: Callable[[Program, PassState, Options], Program],
) -> Callable[[PassState, Options], PassState]:
    def run(state: PassState, options: Options) -> PassState:
        assert state.program is not None
        return dataclasses.replace(state, program=transform(state.program, state, options))

    return run


# Before any layout; run once per signature of a function
GRAPH_PASSES: tuple[tuple[str, Callable[[Graph], Graph]], ...] = (("simplify", simplify),)

AFTER_PARTITION: tuple[Pass, ...] = (
    Pass(
        "choose attention kernels",
        _on_program(lambda program, state, options: with_kernels(program, _target(options), options.attention_kernel)),
    ),
    Pass("exchange filled slots", _on_program(lambda program, state, options: ragged_exchange(program))),
    Pass(
        "bucket collectives",
        _on_program(
            lambda program, state, options: bucket(program, options.weight_update, _decides(options), state.refined)
        ),
    ),
)

# From a graph with its pipelines to a program whose overlap is not planned
TO_PROGRAM: tuple[Pass, ...] = (
    Pass("shard weight updates", _shard_weight_updates),
    Pass("partition", _partition),
    *AFTER_PARTITION,
    Pass("collectives in steps", _in_steps),
)

# For one mesh and layout
PASSES: tuple[Pass, ...] = (
    Pass("pipeline", _pipeline),
    *TO_PROGRAM,
    Pass("unroll loops", _on_program(lambda program, state, options: _unroll(program, options))),
    Pass("plan overlap", _plan_overlap),
)

LAST = Pass("order prints", _on_program(lambda program, state, options: order_prints(program)))


def _passes(options: Options) -> Iterator[Pass]:
    """`PASSES`, those of the target, and the last one."""
    yield from PASSES
    for name, rewrite in _target(options).passes:
        yield Pass(name, _on_program(lambda program, state, options, rewrite=rewrite: rewrite(program)))
    yield LAST


@dataclass(frozen=True)
class Stage:
    """The graph, or the program after partition, that a pass returned. `changed` tells whether the pass changed it."""

    name: str
    graph: Graph
    changed: bool


def begin(traced: Graph) -> tuple[Stage, ...]:
    """The stages that need no layout: the traced graph, and the graph after each of `GRAPH_PASSES`."""
    stages = [Stage("trace", traced, True)]
    for name, transform in GRAPH_PASSES:
        before = stages[-1].graph
        graph = verify(transform(before), name)
        stages.append(Stage(name, graph, graph is not before))
    return tuple(stages)


def run(
    begun: Sequence[Stage],
    mesh: Mesh,
    layout: Layout,
    results: Sequence[str],
    options: Options,
) -> tuple[PassState, tuple[Stage, ...]]:
    """The state after all passes, and every stage.

    A pass whose option has no effect is left out, with a warning unless `options.strict`. Raises `LayoutError` for an
    illegal layout, `NoEffectError` for options without effect, and `InternalError`, naming the pass, if a pass returns
    an invalid graph or program.
    """
    layout, update, params = of_params(begun[-1].graph, mesh, layout, results, options.weight_update)
    options = dataclasses.replace(options, weight_update=update)
    state = PassState(begun[-1].graph, layout, results, RefinedMesh(mesh, mesh), params=params)
    stages = list(begun)
    for compiler_pass in _passes(options):
        try:
            state = compiler_pass.run(state, options)
        except NoEffectError as error:
            no_effect(error, options.strict)
        current: Graph = state.graph if state.program is None else state.program
        changed = current is not stages[-1].graph
        if changed:
            verify(current, compiler_pass.name)
            if isinstance(current, Program):
                check(current, compiler_pass.name)
        stages.append(Stage(compiler_pass.name, current, changed))
    return state, tuple(stages)
