"""`md.verify_jax`: whether a sharded JAX program computes what one device computes, and what it sends."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import jax
import numpy as np

from ... import jax_functions
from ...cost.machine import Machine
from ...cost.machine import machine as machine_called
from ...errors import ShapeError, TraceError, nearest
from .collectives import SUMS, Axes
from .explain import Reference, scales_of
from .findings import Finding, Search
from .price import Sent, collectives
from .primitives import is_float
from .report import JaxReport
from .simulate import Blocks, Run
from .states import Names
from .static import Static
from .trace import TracedStep, trace

TOLERANCE, NARROW_TOLERANCE = 1e-8, 1e-4


def verify_jax(
    f: Callable[..., Any],
    *args: Any,
    reference: Callable[..., Any] | None = None,
    dims: Mapping[str, str] | None = None,
    simulate: bool = True,
    machine: str | Machine | None = None,
    except_: Mapping[str, str] | None = None,
    seed: int = 0,
) -> JaxReport:
    """Check that a JAX function with `jax.shard_map` in it computes what one device computes, and list what it sends.

    The function is traced, not run, so its mesh needs no devices; nothing in it changes. It is simulated on all devices
    of its mesh, in NumPy, with floats of 64 bits, and compared with the same function on a mesh of axes of size 1. If a
    result differs, the report names the line at which values stop being those of one device: an operand that is a
    partial sum, a sum counted twice, blocks in a wrong order.

    `f` is the function, under `jax.jit` or not; `jax.shard_map` may be anywhere in it. Its arguments `args` are used as
    they are; where a float array has one value only, such as zeros, other numbers are drawn, and so they are for
    `jax.ShapeDtypeStruct`. Give indices as arrays. `seed` is that of the numbers.

    `reference` is a function of the same arguments and results that one device computes, in place of `f` on axes of
    size 1. It finds also what is wrong on every mesh alike, such as a forgotten mean, and is needed where the program
    has the size of its mesh written into it, such as the pairs of a ring. With `simulate=False`, shardings are followed
    without computing: at any size, in less than a second, but results may stay undecided. `except_` are lines whose
    values depend on the devices by intention, such as `{"model.py:42": "a key for each device"}`. The report prints the
    reason; what depends on them stays undecided.

    `dims` are dims of the axes of arguments by path, such as `{"w": "io hidden", "*/scale": "model"}`; the report then
    names them. `machine` is a machine, such as "h100", for the seconds of each collective.

    Raises `ShapeError` for dims of an argument that is not there, `TraceError` if JAX cannot trace `f`, if there is
    neither a `jax.shard_map` nor a sharding constraint in it, or if a primitive cannot be simulated.

    >>> import jax, jax.numpy as jnp
    >>> from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
    >>> import meshdsl as md
    >>> def mean(x):
    ...     return jax.lax.psum(jnp.mean(x), "rows")
    >>> mesh = AbstractMesh((4,), ("rows",), axis_types=(AxisType.Auto,))
    >>> step = jax.shard_map(mean, mesh=mesh, in_specs=P("rows"), out_specs=P())
    >>> report = md.verify_jax(step, jax.ShapeDtypeStruct((8,), "float32"))
    >>> report.ok, report.findings[0].axes, [(c.kind, c.bytes) for c in report.collectives]
    (False, ('rows',), [('all_reduce', 4)])
    >>> report.findings[0].what
    "adds the means of parts over 'rows': the result is 4 times too large"
    """
    traced, refused = _traced(f, args)
    case = _Case(f, args, traced, refused, dims or {}, seed)
    asked = Static()
    asked.program(traced.jaxpr, None, case.names, [getattr(x, "sharding", None) for x in traced.arguments])
    case.known = asked.names
    divided = any(traced.shard_maps())
    if not divided and not asked.constraints:
        raise TraceError(
            "there is no jax.shard_map in this function, and no sharding that it asks for\n"
            "  md.from_jax imports a function of whole arrays, and md.compile says what each layout of it sends"
        )
    chip = machine_called(machine) if isinstance(machine, str) else machine
    sent = tuple(collectives(traced.jaxpr, chip, asked.names))
    case.notes += _narrow_sums(sent)
    if divided and simulate:  # without a shard_map, the compiler divides the work and keeps the results
        case.simulated(reference)
    elif divided:
        case.followed("")
    case.leave_out(except_ or {})
    found, notes = tuple(case.findings), tuple(case.notes)
    return JaxReport(found, case.undecided, sent, traced.results, traced.sizes(), notes, tuple(asked.constraints))


@dataclass
class _Case:
    """One program to verify, and what is found about it."""

    f: Callable[..., Any]
    args: Sequence[Any]
    traced: TracedStep
    refused: str
    dims: Mapping[str, str]
    seed: int
    findings: list[Finding] = field(default_factory=list[Finding])
    undecided: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])
    known: dict[Any, Names] = field(default_factory=dict[Any, Names])  # the dims of variables

    def __post_init__(self) -> None:
        self.names = _dims_of(self.traced, self.dims)
        if self.refused:
            self.notes.append(f"JAX refuses it under check_vma=True: {self.refused}")

    def simulated(self, reference: Callable[..., Any] | None) -> None:
        """Compare a run on the program's mesh with one on one device."""
        Run().reserve(jax_functions.opened(self.traced.jaxpr)[0].invars, {}, None)
        one = self.on_one_device(reference)
        if one is None:
            return
        arrays, twin, wanted = self.drawn(one)
        run = Run()
        results = run.program(self.traced.jaxpr, arrays)
        if reference is not None and len(wanted) != len(results):
            raise TraceError(f"the reference has {len(wanted)} results, and the function has {len(results)}")
        self.notes += _integers(self.traced)
        search, wrong = self.compared(one, run, twin, arrays, results, wanted)
        floats = [(name, v.array) for name, v in zip(self.traced.results, wanted, strict=True) if is_float(v.array)]
        infinite = [name for name, x in floats if x.size and not np.isfinite(x).any()]
        self.undecided |= dict.fromkeys(infinite, "no number of it is finite")
        if not wrong:
            self.on_another_mesh(one, twin, arrays, wanted)
        elif twin.guessed:
            self.followed("a permutation in it is written for this mesh, so there is no run on one device")
        else:
            differing = [name for name, v in zip(self.traced.results, results, strict=True) if v in wrong]
            shown = ", ".join(differing or ["blocks that out_specs calls equal"])
            self.notes.append(f"what differs from one device: {shown}")
            found = search.findings(wrong)
            self.findings += found or [Finding(f"{shown} is not what one device computes", (), "result")]

    def on_one_device(self, reference: Callable[..., Any] | None) -> TracedStep | None:
        """The reference, or the function on axes of size 1; None if JAX cannot trace that: then shardings are
        followed."""
        ones = dict.fromkeys(self.traced.sizes(), 1)
        if reference is not None:
            return trace(reference, self.args, ones)
        try:
            return trace(self.f, self.args, ones, False if self.refused else None)
        except Exception as error:
            self.followed(f"it cannot be traced for one device ({_first_line(error)})")
            return None

    def compared(
        self, one: TracedStep, run: Run, twin: Run, arrays: Sequence[Any], results: list[Blocks], wanted: list[Blocks]
    ) -> tuple[Search, list[Blocks]]:
        """The results of a run that are not those of one device, beyond rounding."""
        search = self.search(run, twin, arrays)
        if not (wrong := search.differing(results, wanted)):
            return search, wrong
        search = self.search(run, twin, arrays)
        return search, search.differing(results, wanted, _rounding(one, arrays, wanted))

    def search(self, run: Run, twin: Run, arrays: Sequence[Any]) -> Search:
        tolerance = NARROW_TOLERANCE if run.narrow or twin.narrow else TOLERANCE
        inputs = [Blocks(x[None] if isinstance(x, np.ndarray) else x, {}) for x in arrays]
        reference = Reference(twin, inputs, scales_of([*self.traced.sizes().values()]), tolerance)
        return Search(run, reference, self.known)

    def drawn(self, one: TracedStep) -> tuple[list[Any], Run, list[Blocks]]:
        """Arguments, and the run of one device on them: normal numbers, or positive ones if no result is finite."""
        for positive in (False, True):
            rng = np.random.default_rng(self.seed)
            arrays = [_drawn(x, rng, positive, self.traced.arguments) for x in self.traced.arguments]
            twin = Run()
            wanted = twin.program(one.jaxpr, arrays)
            if all(np.isfinite(v.array).all() for v in wanted if is_float(v.array)):
                break
        return arrays, twin, wanted

    def on_another_mesh(self, one: TracedStep, twin: Run, arrays: Sequence[Any], wanted: list[Blocks]) -> None:
        """Right on this mesh: say so if it is not on one of other sizes, where that can be tried."""
        sizes = self.traced.sizes()
        doubled = [{a: 2 * n for a, n in sizes.items()}, *({**sizes, a: 2 * n} for a, n in sizes.items())]
        for other in doubled:
            try:
                traced = trace(self.f, self.args, other, False if self.refused else None)
            except Exception:
                continue  # its arrays cannot be divided so, or the sizes are written into it
            run = Run()
            try:
                results = run.program(traced.jaxpr, arrays)
            except TraceError:
                return
            if [v.shape for v in results] != [v.shape for v in wanted] or _is_written_for(run, sizes):
                return
            search, wrong = self.compared(one, run, twin, arrays, results, wanted)
            if wrong:
                found = search.findings(wrong)
                what = f"on {_shown(other)} it is not: {found[0]}" if found else f"on {_shown(other)} it is not"
                self.notes.append(f"{what}; or {_shown(sizes)} is written into it")
            return

    def followed(self, why: str) -> None:
        """Follow the shardings; `why`: what kept the simulation from deciding."""
        try:
            one = trace(self.f, self.args, dict.fromkeys(self.traced.sizes(), 1)).jaxpr
        except Exception:
            one = None
        static = Static()
        decided = static.program(self.traced.jaxpr, one, self.names)
        self.findings += static.findings
        for name, known in zip(self.traced.results, decided, strict=True):
            if why or not known:
                self.undecided[name] = f"{why}; pass reference=" if why else "no rule decides it; simulate=True does"

    def leave_out(self, excepted: Mapping[str, str]) -> None:
        for line, why in excepted.items():
            own = [f for f in self.findings if any(str(at).endswith(line) for at in (*f.lines, *f.since_lines))]
            if not own:
                self.notes.append(f"except_ names {line!r}, where nothing is found")
                continue
            self.findings = [f for f in self.findings if f not in own]
            self.undecided[f"what depends on {line}"] = f"it differs by intention: {why}"


def _traced(f: Callable[..., Any], args: Sequence[Any]) -> tuple[TracedStep, str]:
    """The function, and what JAX's check of types that vary has against it; then it is traced without that check."""
    try:
        return trace(f, args), ""
    except (ValueError, TypeError) as error:
        try:
            return trace(f, args, check_vma=False), _first_line(error)
        except (ValueError, TypeError):
            name = getattr(f, "__name__", "the function")
            raise TraceError(f"JAX cannot trace {name}: {type(error).__name__}: {error}") from error


def _first_line(error: BaseException) -> str:
    lines = [line.strip(" *") for line in str(error).splitlines() if line.strip()]
    saying = [line for line in lines if "out_specs[" in line or "is P(" in line]
    return (saying or lines or [type(error).__name__])[0][:300]


def _dims_of(traced: TracedStep, dims: Mapping[str, str]) -> list[Names]:
    """The dims of each argument; a key is its path, the end of it, or a pattern such as `*/w`."""
    shapes = [tuple(x.shape) for x in traced.arguments]
    found: list[Names] = [("",) * len(shape) for shape in shapes]
    for key, text in dims.items():
        own = [i for i, label in enumerate(traced.labels) if fnmatch(label, key) or label.endswith(f"/{key}")]
        if not own:
            raise ShapeError(f"dims names {key!r}, and no argument is called so; {nearest(key, traced.labels)}")
        for i in own:
            if len(text.split()) != len(shapes[i]):
                raise ShapeError(f"{traced.labels[i]} has the shape {shapes[i]}, and dims[{key!r}] is {text!r}")
            found[i] = tuple(text.split())
    return found


def _drawn(x: Any, rng: np.random.Generator, positive: bool, every: Sequence[Any]) -> Any:
    """Numbers for one argument; floats in 64 bits."""
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        return jax.random.split(jax.random.key(0), x.shape) if x.shape else jax.random.key(0)
    floating = jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)
    if isinstance(x, jax.ShapeDtypeStruct):
        if floating:
            return rng.uniform(0.5, 1.5, x.shape) if positive else rng.normal(size=x.shape)
        return rng.integers(0, 2 if x.dtype == bool else _bound(every), x.shape).astype(x.dtype)
    x = np.asarray(x)
    if not floating:
        return x
    x = x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
    return x + rng.uniform(0.1, 0.2, x.shape) if x.size and (x == x.flat[0]).all() else x


def _bound(every: Sequence[Any]) -> int:
    """Integers below this are indices of every axis."""
    return min((n for x in every for n in x.shape if n > 1), default=2)


def _integers(traced: TracedStep) -> list[str]:
    own = [
        label for label, x in zip(traced.labels, traced.arguments, strict=True)
        if isinstance(x, jax.ShapeDtypeStruct) and np.issubdtype(x.dtype, np.integer)
    ]  # fmt: skip
    bound = _bound(traced.arguments)
    return [f"{', '.join(own)}: integers below {bound} are drawn; if they are indices, pass arrays"] if own else []


def _narrow_sums(sent: Sequence[Sent]) -> list[str]:
    own = [c for c in sent if c.primitive in SUMS and c.dtype in ("bfloat16", "float16")]
    lines = dict.fromkeys((c.where, c.dtype, c.axes) for c in own)
    return [f"{where}: a sum over {', '.join(map(repr, axes))} is added in {dtype}" for where, dtype, axes in lines]


def _rounding(one: TracedStep, arrays: Sequence[Any], wanted: Sequence[Blocks]) -> list[float]:
    """100 times what each result changes on one device when every number is computed a little wrong.

    A result that cancels, such as a sum of what has the mean 0, is nothing but rounding.
    """
    others = Run(noise=np.random.default_rng(0)).program(one.jaxpr, arrays)
    pairs = [(a.array, b.array) for a, b in zip(others, wanted, strict=True)]
    return [100 * float(np.abs(a - b).max(initial=0)) if is_float(a) else 0.0 for a, b in pairs]


def _is_written_for(run: Run, sizes: Axes) -> bool:
    """True if a permutation of a run on larger axes moves blocks of the devices of the smaller ones only."""
    for step in run.steps:
        if step.primitive == "ppermute" and len(step.eqn.params["axis_name"]) == 1:
            n = sizes[step.eqn.params["axis_name"][0]]
            if len(step.eqn.params["perm"]) > n // 2 and all(max(pair) < n for pair in step.eqn.params["perm"]):
                return True
    return False


def _shown(sizes: Axes) -> str:
    return " ".join(f"{a}:{n}" for a, n in sizes.items())
