"""`Compiled`: a function on a mesh, under a layout; it is traced, partitioned and compiled once per signature.

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

from ..cost.machine import Machine
from ..cost.machine import machine as machine_named
from ..cost.network import has_slow_axis, place
from ..cost.report.evaluate import cost as report
from ..cost.report.report import Report
from ..errors import LayoutError, ShapeError, TraceError
from ..errors.markup import page_part
from ..errors.no_effect import NoEffectError, no_effect
from ..ir import Graph, Var, walk
from ..layouts import Layout, Mesh, MeshLike
from ..lowering import Program
from ..overlap.values import OverlapPlan
from ..passes.pipelines import Schedule
from ..targets.kernel_choice import is_attention
from ..trace import Tensor, flatten, tree
from ..trace.tensors import concrete
from ..updates.weight_update import UpdateTable
from .arguments import bind
from .inside_jax import array_function, traced_by_jax
from .memory_limit import fitting
from .pipeline import Options, Stage
from .plan import Plan, machine_text
from .signature import Stages, Traced, argument_paths, check_count, spec_of_argument


@dataclass(frozen=True)
class History:
    """The graph or program after every pass, for one signature. `print(history)` shows those that a pass changed."""

    stages: tuple[Stage, ...]

    def __str__(self) -> str:
        sections = (f"== {stage.name} ==\n{stage.graph if stage.changed else 'unchanged'}" for stage in self.stages)
        return "\n\n".join(sections)

    def __getitem__(self, name: str) -> Graph:
        return {stage.name: stage.graph for stage in self.stages}[name]


def _has_choice(options: Options, graph: Graph) -> bool:
    """True if the machine's platform decides the kernel of an attention."""
    return options.attention_kernel == "auto" and any(is_attention(eqn) for eqn, _ in walk(graph))


def _platform(mesh: Mesh, machine: Machine | None) -> str | None:
    """The platform that a function is traced for; None: JAX's default backend."""
    if machine is not None:
        return machine.target.name
    return mesh.devices[0].platform if mesh.devices else None


def _check_machine(options: Options, traced: Traced, mesh: Mesh) -> None:
    """Raise `NoEffectError`, or warn, if no option uses the given machine."""
    updates, plan = options.weight_update.mode, options.overlap.mode
    if options.machine is None or traced.target.read or _has_choice(options, traced.begun[-1].graph):
        return
    in_steps = options.steps == "always" or (options.steps == "auto" and has_slow_axis(options.machine.network, mesh))
    if updates != "auto" and plan == "none" and not in_steps:
        error = NoEffectError(
            f"machine={options.machine.name!r} has no effect with weight_update={updates!r} and overlap={plan!r}\n"
            "  it decides what 'auto' leaves open, when things overlap, and which collectives are in steps\n"
            "  the mesh has no slow axis on it, and this model does not ask md.platform()\n"
            "  to cost a program, give it to .cost()"
        )
        no_effect(error, options.strict)


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
        step: Plan | None = None,
        unplanned: Callable[..., Any] | None = None,
    ):
        self.options = options
        self.function = function
        self.mesh = mesh
        self.layout = layout
        self.donate = tuple(donate)
        self.static = static
        self._by_arguments: dict[Any, Compiled] = {}  # for static and keyword arguments: functions of the others
        self._last: Compiled | None = None  # that of `_by_arguments` that was used last
        self._array_functions: dict[Stages, Callable[..., Any]] = {}
        self.step = step or Plan()  # its knobs of the step are those of `function`
        self.unplanned = unplanned or function  # without knobs of the step
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
        call = bind(self.function, self.static, args, kwargs)
        if call.key not in self._by_arguments:
            donate = [i for i, number in enumerate(call.numbers) if number in self.donate]
            unplanned = bind(self.unplanned, self.static, args, kwargs).function
            self._by_arguments[call.key] = Compiled(
                call.function, self.mesh, self.layout, donate, self.options, step=self.step, unplanned=unplanned
            )
        return self._by_arguments[call.key], call.args

    def _for(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> tuple[Stages, list[Any]]:
        """The stages for the signature of these arguments, and the arguments as leaves."""
        function, args = self._bound(args, kwargs or {})
        if function is not self:
            self._last = function
            return function._for(args)
        flatten(args)  # raises for a tree that is nested too deeply
        with_paths, structure = tree.tree_flatten_with_path(tuple(args))
        leaves = [leaf for _, leaf in with_paths]
        labels = argument_paths(self.function, [path for path, _ in with_paths])
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

            def stages(function: Callable[..., Any], remat: str = "") -> Stages:
                traced = self._traced.get((*key, platform, remat))
                if traced is None:
                    traced = Traced(function, structure, types, labels, platform)
                    self._traced[*key, platform, remat] = traced
                _check_machine(self.options, traced, self.mesh)
                return Stages(traced, self.mesh, self.layout, self.donate, self.options)

            limit = self.options.memory_limit
            if limit is None:
                self._stages[key] = stages(self.function)
            else:
                self.step, self._stages[key] = fitting(self.step, self.unplanned, stages, limit)
        return self._stages[key], leaves

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on the mesh's devices; results are tensors over global arrays."""
        if kwargs or self.static:
            function, moving = self._bound(args, kwargs)
            self._last = function
            return function(*moving)
        leaves, structure = flatten(args)
        stages = self._recent
        if stages is None or not stages.accepts(structure, leaves):
            stages, leaves = self._for(args)
            self._recent = stages
        if traced_by_jax(leaves):
            arrays = [x.array if isinstance(x, Tensor) else x for x in leaves]
            results: Sequence[Any] = self.array_function(stages)(*arrays)
        else:
            results = stages.execute(stages.arrays(leaves))
        return tree.tree_unflatten(stages.result, concrete(stages.out_dims, stages.out_dtypes, results))

    def array_function(self, stages: Stages) -> Callable[..., Any]:
        """The program of one signature as a function of arrays that transformations of JAX take."""
        if stages not in self._array_functions:
            self._array_functions[stages] = array_function(stages)
        return self._array_functions[stages]

    def graph(self, *args: Any, **kwargs: Any) -> Graph:
        """The global graph that is partitioned: traced, differentiated, simplified."""
        return self._for(args, kwargs)[0].graph

    def program(self, *args: Any, **kwargs: Any) -> Program:
        """The program that one device runs."""
        stages, _ = self._for(args, kwargs)
        return stages.program

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
        plan = (self._last or self).step.replace(mesh=self.mesh, layout=self.layout)
        machine = self.options.machine
        return plan if machine is None or not plan.may_use_machine else plan.replace(machine=machine_text(machine))

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
        weight    shape          update cut by  group  saved
        params/w  io=8 hidden=8  io:rows        rows   192 B
        1 of 1 sharded; 192 B less on each device
        >>> [record.kind for record in program.collectives]
        ['all_gather', 'reduce_scatter']

        Raises `TraceError` if no arguments were given yet.
        """
        return self._newest().state.weight_update

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
        return self._newest().state.overlap

    def _newest(self) -> Stages:
        """The stages of the last arguments seen."""
        if self._last is not None:
            return self._last._newest()
        if not self._stages:
            raise TraceError("nothing has been lowered yet\n  call .program(*args) first; specs will do")
        return list(self._stages.values())[-1]

    def pipelines(self, *args: Any, **kwargs: Any) -> tuple[Schedule, ...]:
        """The schedules of the pipelines in the program; `print` shows the ticks of one as a table.

        >>> import meshdsl as md
        >>> def step(w, x):
        ...     layers = lambda w, x: md.scan(lambda x, w: (md.tanh(x * w), None), x, w, over="layer")[0]
        ...     return md.accumulate(lambda part: md.grad(lambda w: md.sum(layers(w, part)))(w), x, steps=2)
        >>> compiled = md.compile(step, "stages:2", "layer:stages")
        >>> print(*compiled.pipelines(md.spec("layer:4 io:8"), md.spec("batch:4 io:8")))
        tick     0   1      2      3
        stage 0  F0  F1     B0     B1
        stage 1  -   F0 B0  F1 B1  -
        """
        return self.program(*args, **kwargs).schedules

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
        stages, _ = self._for(args, kwargs)
        program = stages.program
        if limit is not None and not limit > 0:
            raise LayoutError(f"limit is a number of bytes above 0, or None for the machine's memory; got {limit}")
        on = machine if isinstance(machine, Machine) else machine_named(machine)
        placement = place(on.network, self.mesh, assignment)
        return report(
            program,
            on,
            donated=tuple(program.ins[i] for i in stages.donated),
            placement=stages.state.refined.placement(placement),
            mesh=self.mesh,
            limit=limit,
            layout=self.layout,
            title=getattr(self.function, "__name__", "").replace("<lambda>", ""),
        )

    def donated(self, *args: Any, **kwargs: Any) -> tuple[Var, ...]:
        """The inputs of the program whose memory its results may reuse."""
        program = self.program(*args, **kwargs)
        return tuple(program.ins[i] for i in self._for(args, kwargs)[0].donated)

    def under(self, mesh: MeshLike, layout: Layout | str | dict[str, Any]) -> Compiled:
        """The same function on another mesh or under another layout; existing traces are reused."""
        other = copy.copy(self)
        other.mesh = Mesh(mesh)
        other.layout = layout if isinstance(layout, Layout) else Layout(layout)
        other._stages, other._recent, other._by_arguments, other._array_functions = {}, None, {}, {}
        other._last = None
        return other
