"""`md.compile` binds a function to a mesh and a layout; it traces, partitions and compiles once per signature.

Every stage can be read before anything runs: `.graph`, `.program`, `.history`, `.lower`. Until the function is called,
arguments may be specs, and the mesh may have more devices than the machine.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from .arguments import bind, static_names
from .cost.machine import Machine
from .cost.machine import machine as machine_named
from .cost.network import place
from .display.markup import page_part
from .errors import LayoutError, MeshdslError, ShapeError, TraceError, at, caller
from .inside_jax import array_function, traced_by_jax
from .ir import Graph, Var
from .layouts import Layout, Mesh
from .lowering import Program
from .pipeline import Options, Stage
from .plan import Plan, machine_text, planned
from .report.evaluate import cost as report
from .report.report import Report
from .signature import Stages, Traced, argument_path, check_count, spec_of_argument
from .trace import Tensor, tree
from .tune.groups import group_of
from .tune.overlap.values import Overlap, OverlapPlan
from .tune.weight_update import UpdateTable, WeightUpdate

__all__ = ["Compiled", "History", "compile", "host_devices"]


@dataclass(frozen=True)
class History:
    """The graph or program after every pass, for one signature. `print(history)` shows those that a pass changed."""

    stages: tuple[Stage, ...]

    def __str__(self) -> str:
        sections = (f"== {stage.name} ==\n{stage.graph if stage.changed else 'unchanged'}" for stage in self.stages)
        return "\n\n".join(sections)

    def __getitem__(self, name: str) -> Graph:
        return {stage.name: stage.graph for stage in self.stages}[name]


def _platform(mesh: Mesh, machine: Machine | None) -> str | None:
    """The platform that a function is traced for; None: JAX's default backend."""
    if machine is not None:
        return machine.platform
    return mesh.devices[0].platform if mesh.devices else None


def _check_machine(options: Options, traced: Traced) -> None:
    """Raise `LayoutError` if the machine decides nothing."""
    updates, plan = options.weight_update.mode, options.overlap.mode
    if options.machine is not None and not traced.target.asked and updates != "auto" and plan == "none":
        raise LayoutError(
            f"machine={options.machine.name!r} has no effect with weight_update={updates!r} and overlap={plan!r}\n"
            "  it decides what 'auto' leaves open and when things overlap, and this model does not ask md.platform()\n"
            "  to cost a program, give it to .cost()"
        )


class Compiled:
    """A function on a mesh, under a layout; the result of `md.compile`. Call it, or read its stages.

    >>> import meshdsl as md
    >>> compiled = md.compile(lambda x: md.sum(x * x, "batch"), "rows:4", "batch:rows")
    >>> x = md.tensor([[1.0, 2.0], [3.0, 4.0]], "batch io")
    >>> compiled(x)
    tensor(float32[io=2], [10. 20.])
    >>> [str(eqn.op) for eqn in compiled.program(md.spec("batch:8 io:2")).eqns]
    ['multiply', 'sum', 'all_reduce(sum) over rows']

    The stages take specs as well as tensors, and need no devices. Raises `LayoutError` for an illegal layout when the
    program is first built, and when it is called on a mesh whose devices are not available.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        mesh: Mesh,
        layout: Layout,
        donate: Sequence[int],
        options: Options,
        static: frozenset[str] = frozenset(),
    ):
        self.options = options
        self.function = function
        self.mesh = mesh
        self.layout = layout
        self.donate = tuple(donate)
        self.static = static
        self._by_arguments: dict[Any, Compiled] = {}  # for static and keyword arguments: functions of the others
        self._last: Compiled = self  # that of `_by_arguments` that was used last
        self._array_functions: dict[Stages, Callable[..., Any]] = {}
        self.step = Plan()  # its knobs of the step are those of `function`
        self.unplanned = function  # without knobs of the step
        self._recent: Stages | None = None  # of the last call
        self._stages: dict[Any, Stages] = {}
        self._traced: dict[Any, Traced] = {}  # shared with the functions that `under` returns

    def __repr__(self) -> str:
        return f"<{self._heading()}>"

    def _heading(self) -> str:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return f"compiled {name} on {self.mesh or 'one device'}, layout {str(self.layout) or '(empty)'}"

    def _repr_html_(self) -> str:
        lines = [f"overrides {self.layout.overrides}"] if self.layout.overrides else []
        for each in dataclasses.fields(self.options):
            value = getattr(self.options, each.name)
            if value != each.default:
                lines.append(f"{each.name} = {getattr(value, 'name', value)}")
        programs = [repr(stages.program)[1:-1] for stages in self._stages.values() if stages.has_program]
        lines += programs or ["no program yet; .program(*args) shows what a device runs, specs will do"]
        return page_part(self._heading(), "\n".join(lines), self.mesh.axes)

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Compiled, Sequence[Any]]:
        """The function of all arguments but the static ones, by position, and these arguments."""
        if not kwargs and not self.static:
            return self, args
        try:
            call = bind(self.function, self.static, args, kwargs)
        except MeshdslError as error:
            raise at(error, caller()) from None
        if call.key not in self._by_arguments:
            donate = [i for i, number in enumerate(call.numbers) if number in self.donate]
            self._by_arguments[call.key] = Compiled(call.function, self.mesh, self.layout, donate, self.options)
        return self._by_arguments[call.key], call.args

    def _for(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> tuple[Stages, list[Any]]:
        """The stages for the signature of these arguments, and the arguments as leaves."""
        function, args = self._bound(args, kwargs or {})
        if function is not self:
            self._last = function
            return function._for(args)
        try:
            with_paths, structure = tree.tree_flatten_with_path(tuple(args))
            leaves = [leaf for _, leaf in with_paths]
            labels = [argument_path(self.function, path) for path, _ in with_paths]
            check_count(self.function, args)
            types = tuple(spec_of_argument(leaf, label) for leaf, label in zip(leaves, labels, strict=True))
            for n in self.donate:
                if not 0 <= n < len(args):
                    raise ShapeError(
                        f"donate={self.donate} of a call with {len(args)} arguments\n"
                        f"  it lists arguments by number, from 0 to {len(args) - 1}"
                    )
            key = (structure, types)
            if key not in self._stages:
                platform = _platform(self.mesh, self.options.machine)
                for_platform = (*key, platform)
                if for_platform not in self._traced:
                    self._traced[for_platform] = Traced(self.function, structure, types, labels, platform)
                traced = self._traced[for_platform]
                _check_machine(self.options, traced)
                self._stages[key] = Stages(traced, self.mesh, self.layout, self.donate, self.options)
            return self._stages[key], leaves
        except MeshdslError as error:
            raise at(error, caller()) from None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on the mesh's devices; results are tensors over global arrays."""
        if kwargs or self.static:
            function, moving = self._bound(args, kwargs)
            self._last = function
            return function(*moving)
        leaves, structure = tree.tree_flatten(args)
        stages = self._recent
        if stages is None or not stages.accepts(structure, leaves):
            stages, leaves = self._for(args)
            self._recent = stages
        try:
            if traced_by_jax(leaves):
                arrays = [x.array if isinstance(x, Tensor) else x for x in leaves]
                results: Sequence[Any] = self.array_function(stages)(*arrays)
            else:
                results = stages.executable(*stages.arrays(leaves))
        except MeshdslError as error:
            raise at(error, caller()) from None
        tensors = [Tensor(v.shape, v.dtype, array=x) for v, x in zip(stages.graph.outs, results, strict=True)]
        return tree.tree_unflatten(stages.result, tensors)

    def array_function(self, stages: Stages) -> Callable[..., Any]:
        """The program of one signature as a function of arrays that JAX can trace and differentiate."""
        if stages not in self._array_functions:
            compiled = lambda f: Compiled(f, self.mesh, self.layout, (), Options())  # noqa: E731 - one line
            self._array_functions[stages] = array_function(stages, compiled)
        return self._array_functions[stages]

    def graph(self, *args: Any, **kwargs: Any) -> Graph:
        """The global graph that is partitioned: traced, differentiated, simplified."""
        return self._for(args, kwargs)[0].graph

    def program(self, *args: Any, **kwargs: Any) -> Program:
        """The program that one device runs."""
        stages, _ = self._for(args, kwargs)
        try:
            return stages.program
        except MeshdslError as error:
            raise at(error, caller()) from None

    def history(self, *args: Any, **kwargs: Any) -> History:
        """The graph or program after every pass of the pipeline, by the pass's name."""
        self.program(*args, **kwargs)
        return History(self._for(args, kwargs)[0].pipeline_result[1])

    @property
    def plan(self) -> Plan:
        """The plan of this function: mesh, layout and options as one value.

        >>> import meshdsl as md
        >>> compiled = md.compile(lambda x: md.sum(x, "batch"), "rows:4", "batch:rows")
        >>> compiled.plan == md.Plan("rows:4", "batch:rows")
        True
        """
        plan = self.step.replace(
            mesh=self.mesh,
            layout=self.layout,
            weight_update=self.options.weight_update,
            overlap=self.options.overlap,
        )
        machine = self.options.machine
        return plan if machine is None or not plan.needs_machine else plan.replace(machine=machine_text(machine))

    @property
    def weight_update(self) -> UpdateTable:
        """The decisions about the update of every weight, for the last arguments seen; `print` shows a table.

        >>> import meshdsl as md
        >>> def step(params, x):
        ...     loss = lambda params: md.mean(md.square(md.dot(x, params["w"], "io")))
        ...     return {"w": params["w"] - 0.1 * md.grad(loss)(params)["w"]}
        >>> compiled = md.compile(step, "rows:4", "batch:rows", weight_update="sharded")
        >>> program = compiled.program({"w": md.spec("io:8 hidden:8")}, md.spec("batch:16 io:8"))
        >>> print(compiled.weight_update)
        weight    shape          update cut by  group  saved  time
        params/w  io=8 hidden=8  io:rows        rows   192 B
        1 of 1 sharded; 192 B less on each device
        >>> [record.kind for record in program.collectives]
        ['all_gather', 'reduce_scatter']

        Raises `TraceError` if no arguments were given yet.
        """
        if self._last is not self:
            return self._last.weight_update
        if not self._stages:
            raise at(TraceError("nothing has been lowered yet\n  call .program(*args) first; specs will do"), caller())
        return list(self._stages.values())[-1].state.weight_update

    @property
    def overlap(self) -> OverlapPlan:
        """The overlap plan for the last arguments seen, with its windows and the plans tried; `print` shows it.

        >>> import meshdsl as md
        >>> def step(x, w):
        ...     return md.sum(md.square(md.dot(x, w, "io")), "batch")
        >>> compiled = md.compile(step, "rows:4", "io:rows", overlap="auto", machine="a100-p4de")
        >>> program = compiled.program(md.spec("batch:4096 io:4096"), md.spec("io:4096 hidden:4096"))
        >>> compiled.overlap.after.seconds <= compiled.overlap.before.seconds
        True

        Raises `TraceError` if no arguments were given yet.
        """
        if self._last is not self:
            return self._last.overlap
        if not self._stages:
            raise at(TraceError("nothing has been lowered yet\n  call .program(*args) first; specs will do"), caller())
        return list(self._stages.values())[-1].state.overlap

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """A `jax.stages.Lowered`, on an abstract mesh if the machine lacks the mesh's devices."""
        self.program(*args, **kwargs)
        return self._for(args, kwargs)[0].lower()

    def cost(
        self,
        *args: Any,
        machine: Machine | str | os.PathLike[str] = "tpu-v5e",
        limit: float | None = None,
        assignment: Mapping[str, str | Sequence[str]] | None = None,
        **kwargs: Any,
    ) -> Report:
        """Estimate one call on a machine: time, memory, bytes sent and their causes. Needs no devices.

        >>> import meshdsl as md
        >>> step = md.compile(lambda x, w: md.dot(x, w, "io"), "rows:2 cols:4", "batch:rows io:cols")
        >>> report = step.cost(md.spec("batch:8192 io:8192"), md.spec("io:8192 hidden:8192"), machine="tpu-v5e")
        >>> report.fits, report.constraint
        (True, 'network along cols')
        >>> print(*report.collectives)
        io on cols: 1 all_reduce of 134 MB

        `machine` is a name, or the path of a machine file. `limit` is the memory limit per device in bytes (default:
        the machine's). `assignment` maps mesh axes to hardware axes. Raises `LayoutError` for an illegal layout and for
        a mesh that does not fit the machine, `MachineError` for an unknown machine.
        """
        program = self.program(*args, **kwargs)
        try:
            on = machine if isinstance(machine, Machine) else machine_named(machine)
            placement = place(on.network, self.mesh, assignment)
            return report(
                program,
                on,
                donated=self.donated(*args, **kwargs),
                placement=self._for(args, kwargs)[0].state.refined.placement(placement),
                mesh=self.mesh,
                limit=limit,
                layout=self.layout,
                title=getattr(self.function, "__name__", "").replace("<lambda>", ""),
            )
        except MeshdslError as error:
            raise at(error, caller()) from None

    def donated(self, *args: Any, **kwargs: Any) -> tuple[Var, ...]:
        """The inputs of the program whose memory its results may reuse."""
        program = self.program(*args, **kwargs)
        return tuple(program.ins[i] for i in self._for(args, kwargs)[0].donated)

    def under(self, mesh: Mesh | str, layout: Layout | str | dict[str, Any]) -> Compiled:
        """The same function on another mesh or under another layout; existing traces are reused."""
        other = copy.copy(self)
        try:
            other.mesh = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
            other.layout = layout if isinstance(layout, Layout) else Layout(layout)
        except MeshdslError as error:
            raise at(error, caller()) from None
        other._stages, other._recent, other._by_arguments, other._array_functions = {}, None, {}, {}
        other._last = other
        return other


def compile(
    f: Callable[..., Any],
    mesh: Mesh | str | None = None,
    layout: Layout | str | dict[str, Any] = "",
    *,
    plan: Plan | None = None,
    donate: Sequence[int] | int = (),
    static: Sequence[int | str] | int | str = (),
    weight_update: str | WeightUpdate = "replicated",
    overlap: str | Overlap = "none",
    machine: Machine | str | os.PathLike[str] | None = None,
    gather_limit: float | None = None,
    unroll: bool = False,
) -> Compiled:
    """Compile `f` to one SPMD program on a mesh, under a layout.

    >>> import meshdsl as md
    >>> double = md.compile(lambda x: md.sum(x * 2, "batch"), md.Mesh("rows:4"), md.Layout("batch:rows"))
    >>> double.program(md.spec("batch:8 io:2")).collectives[0].kind
    'all_reduce'

    Results equal those of `f` itself under every legal layout. `donate` lists the numbers of arguments whose memory
    the results may reuse; such arguments cannot be used afterwards. `static` lists arguments, by name or number, that
    are Python values with a hash (flags, sizes): each value has a program of its own. If a contraction of two operands
    would gather one of them to more than `gather_limit` bytes per device, the operand is sent around the devices block
    by block instead (0: always; None: never).

    `weight_update` is how a training step updates a weight that several devices store. "replicated": every device
    updates its complete copy. "sharded": each device updates one shard, and the weight and its optimizer state stay
    sharded between steps (Xu et al., 2020). "auto": sharded where that is faster on `machine` (default "tpu-v5e"). A
    `md.WeightUpdate` also sets groups of devices, buckets of small tensors, and gathering again for the backward pass.
    `print(compiled.weight_update)` shows the decisions.

    `overlap` is how communication overlaps with computation. "none": no plan. A mode of `md.Overlap`, such as "list"
    or "halves": that plan. "auto": the fastest of them on `machine` (default "tpu-v5e") that fits its memory.
    `print(compiled.overlap)` shows the plan.

    `machine` also says what `md.platform` returns to the model, for choices such as the dispatch of a mixture of
    experts; without it, this is the platform of the devices.

    `plan` is a `md.Plan`, which has mesh, layout, `weight_update` and `overlap`, and sets rematerialisation and
    micro-batches of a step that takes them (`workload.train_step()` does). `plan.machine` is used if no `machine` is
    given.

    With `unroll`, loops become sequences of their layers. Steps are faster on most devices, because no value is stacked
    and sliced; compile time grows with depth. Every overlap plan but "skew" unrolls too.

    Raises `LayoutError` before anything runs: for an illegal layout, and for options without effect ("sharded" where
    nothing can be sharded, buckets where nothing can be joined, an overlap that moves nothing, a machine that decides
    nothing).
    """
    try:
        if gather_limit is not None and not gather_limit >= 0:
            raise LayoutError(f"gather_limit is a number of bytes from 0, or None for no limit; got {gather_limit!r}")
        step, unplanned = plan or Plan(), f
        if plan is not None:
            _check_alone(mesh, layout, weight_update, overlap)
            mesh, layout, weight_update, overlap = plan.mesh, plan.layout, plan.weight_update, plan.overlap
            machine, f = machine or plan.machine, planned(f, plan)
        if mesh is None:
            raise LayoutError(
                "md.compile needs a mesh, or a plan\n"
                "  for example md.compile(f, 'rows:2 cols:4', 'batch:rows'), or md.compile(f, plan=plan)"
            )
        updates = weight_update if isinstance(weight_update, WeightUpdate) else WeightUpdate(weight_update)
        windows = overlap if isinstance(overlap, Overlap) else Overlap(overlap)
        cost_machine = None
        if machine is not None or updates.mode == "auto" or windows.mode != "none":
            cost_machine = machine if isinstance(machine, Machine) else machine_named(machine or "tpu-v5e")
        mesh = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
        layout = layout if isinstance(layout, Layout) else Layout(layout)
        if updates.group is not None:
            group_of(mesh, updates.group)
        fixed = static_names(f, static)
    except MeshdslError as error:
        raise at(error, caller()) from None
    donated = (donate,) if isinstance(donate, int) else donate
    compiled = Compiled(f, mesh, layout, donated, Options(gather_limit, updates, unroll, windows, cost_machine), fixed)
    compiled.step, compiled.unplanned = step, unplanned
    return compiled


def _check_alone(mesh: Any, layout: Any, weight_update: Any, overlap: Any) -> None:
    """Raise `LayoutError` for options that a plan already has."""
    given = {"mesh": mesh is not None, "layout": bool(layout), "weight_update": weight_update != "replicated"}
    given["overlap"] = overlap != "none"
    twice = [name for name, is_given in given.items() if is_given]
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
            raise at(
                LayoutError(
                    f"JAX has already started with {len(jax.devices('cpu'))} CPU devices, so {count} cannot be made\n"
                    "  call md.host_devices before the first computation, tensor or jax.devices()"
                ),
                caller(),
            ) from None
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise at(LayoutError(f"asked for {count} CPU devices, JAX made {len(devices)}"), caller())
    return devices[:count]
