"""A model is a function whose parameters are made where they are used and live in a flat dict, path -> tensor.

The function never learns whether it is being initialised or applied. To initialise, it is traced on the types of its
inputs, which says which parameters it makes; each one is then drawn from a key folded with a hash of its own path, so
a parameter that is added, removed or moved does not change what the others draw.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from . import init as initializers
from .autodiff import zeros
from .control import checkpoint, scan
from .dims import Dim, DimLike, DimsLike, Shape, pick, show
from .errors import MeshdslError, ShapeError, TraceError, Where, at, caller, nearest, raised
from .ir import Type
from .ops import random
from .trace import trace, tree
from .values import Tensor

__all__ = ["Model", "eval_shape", "layers", "model", "param", "scope"]


@dataclass(frozen=True)
class Declared:
    """One parameter as a model's function asks for it; `dims` begin with those of the `layers` around it."""

    dims: Shape
    dtype: np.dtype
    init: Callable[..., Tensor]
    where: Where

    @property
    def type(self) -> Type:
        return Type(self.dims, self.dtype)


@dataclass
class _Pass:
    """One run of a model's function: what it declared so far, and where the values come from (None: nowhere yet)."""

    values: Mapping[str, Any] | None
    declared: dict[str, Declared] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    stacked: Shape = ()
    slices: dict[str, Tensor] = field(default_factory=dict)  # inside `layers`: this layer's part of each parameter


class _State(threading.local):
    run: _Pass | None = None


_state = _State()


@contextlib.contextmanager
def _running(run: _Pass) -> Iterator[_Pass]:
    before, _state.run = _state.run, run
    try:
        yield run
    except MeshdslError as error:  # a layer's error gets the line that called the layer
        raise at(error, raised(error) or caller()) from None
    finally:
        _state.run = before


def _run(what: str) -> _Pass:
    if _state.run is None:
        raise at(
            TraceError(
                f"{what} is used outside a model\n"
                "  a parameter belongs to the model whose function is running, and none is\n"
                "  wrap the function: model = md.model(f); then model.init(key, *inputs) and model(params, *inputs)"
            ),
            caller(),
        )
    return _state.run


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Parameters made inside have `name/` in front of their path.

    >>> import meshdsl as md
    >>> def f(x):
    ...     with md.scope("layer"):
    ...         return x * md.param("scale", "io:3", init=md.init.ones())
    >>> md.model(f).specs(md.spec("io:3"))
    {'layer/scale': float32[io=3]}

    Raises `ShapeError` for a name that is not like a Python variable, `TraceError` outside a model.
    """
    run = _run(f"md.scope({name!r})")
    _check_name(name, "scope")
    before = run.path
    run.path = (*before, name)
    try:
        yield
    finally:
        run.path = before


def _check_name(name: str, what: str) -> None:
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split("/")):
        raise at(
            ShapeError(
                f"a {what} is named like a Python variable, got {name!r}\n"
                "  names become paths such as 'layer/w', which layouts and checkpoints refer to"
            ),
            caller(),
        )


def param(name: str, dims: DimsLike, init: Callable[..., Tensor] | None = None, dtype: Any = "float32") -> Tensor:
    """The parameter `name` of the running model, in the current scope.

    >>> import meshdsl as md
    >>> model = md.model(lambda x: md.einsum(x, md.param("w", "io:2 hidden:4"), out="batch hidden"))
    >>> params = model.init(md.random.key(0), md.spec("batch:8 io:2"))
    >>> params["w"].dims
    (io=2, hidden=4)

    `init(key, dims, dtype)` draws its first value (default `md.init.normal(0.02)`); see `md.init`. Inside
    `md.layers`, the parameter of all layers is one tensor with the dim of the layers in front; this is one layer's.
    Raises `ShapeError` when the path is taken, `TraceError` outside a model.
    """
    run = _run(f"md.param({name!r})")
    _check_name(name, "parameter")
    path = "/".join((*run.path, name))
    try:
        shape = pick(dims, (), new=True)
        kind = Type((*run.stacked, *shape), np.dtype(jnp.dtype(dtype)))
        if path in run.declared:
            raise ShapeError(
                f"the parameter {path!r} is made twice\n"
                f"  it is there already, from {run.declared[path].where}\n"
                "  to share it, keep the tensor and use it twice; to have two, put one in its own md.scope"
            )
    except MeshdslError as error:
        raise at(error, caller()) from None
    run.declared[path] = Declared(kind.shape, kind.dtype, init or initializers.normal(0.02), caller())
    if path in run.slices:
        return run.slices[path]
    return zeros(Type(shape, kind.dtype)) if run.values is None else _value(run, path, kind)


def _value(run: _Pass, path: str, kind: Type) -> Tensor:
    """The tensor given for a path; what is wrong with it is noted, and reported for all parameters at the end."""
    assert run.values is not None
    given = run.values.get(path)
    if given is None:
        run.problems[path] = f"{path}: is not given; it is {kind}"
    elif not isinstance(given, Tensor):
        run.problems[path] = f"{path}: is a {type(given).__name__}, not a tensor; it is {kind}"
    elif given.type != kind:
        run.problems[path] = f"{path}: is given as {given.type}, and is {kind}"
    else:
        return given
    return zeros(kind)


@dataclass(frozen=True)
class Model:
    """A function with parameters, which `md.model` makes: `specs` and `init` give the parameters, a call takes them.

    >>> import meshdsl as md
    >>> scaled = md.model(lambda x: x * md.param("scale", "io:3", init=md.init.constant(2.0)))
    >>> x = md.tensor([1.0, 2.0, 3.0], "io")
    >>> params = scaled.init(md.random.key(0), x)
    >>> params, scaled(params, x)
    ({'scale': tensor(float32[io=3], [2. 2. 2.])}, tensor(float32[io=3], [2. 4. 6.]))
    """

    function: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", "model")

    def declarations(self, *inputs: Any, **more: Any) -> dict[str, Declared]:
        """What the function declares on inputs of these types, by path, in the order it does."""
        run = _Pass(None)

        def discover(*args: Any, **named: Any) -> Any:
            with _running(run):
                return self.function(*args, **named)

        eval_shape(discover, *inputs, **more)
        return run.declared

    def specs(self, *inputs: Any, **more: Any) -> dict[str, Type]:
        """The type of each parameter, by path; nothing is computed. Inputs may be specs.

        >>> import meshdsl as md
        >>> md.model(lambda x: x * md.param("scale", "io:3")).specs(md.spec("batch:8 io:3"))
        {'scale': float32[io=3]}
        """
        return {path: d.type for path, d in self.declarations(*inputs, **more).items()}

    def init(self, key: Tensor, *inputs: Any, **more: Any) -> dict[str, Tensor]:
        """The first parameters, by path. Inputs may be specs: only their types matter.

        It is an ordinary traceable function: `md.compile(model.init, mesh, layout)(key, *inputs)` has each device
        draw its own shard, and no device or host ever holds a whole sharded parameter.
        Raises `ShapeError` when an initialiser returns other dims or another dtype than the parameter's.
        """
        drawn = {}
        for path, d in self.declarations(*inputs, **more).items():
            x = d.init(random.fold_in(key, path_hash(path)), d.dims, d.dtype)
            if not isinstance(x, Tensor) or x.type != d.type:
                there = x.type if isinstance(x, Tensor) else type(x).__name__
                raise at(
                    ShapeError(
                        f"the init of parameter {path!r} returned {there}, and the parameter is {d.type}\n"
                        "  an init is a function (key, dims, dtype) -> tensor, for example md.init.normal(0.02)"
                    ),
                    d.where,
                )
            drawn[path] = x
        return drawn

    def __call__(self, params: Mapping[str, Tensor], *inputs: Any, **more: Any) -> Any:
        """The function applied with these parameters.

        Raises `ShapeError`, with all problems at once, for parameters that are missing, unknown, or of another type.
        """
        if not isinstance(params, Mapping):
            raise at(
                ShapeError(
                    f"a model is called with a dict of parameters first, got {type(params).__name__}\n"
                    "  params = model.init(key, *inputs); then model(params, *inputs)"
                ),
                caller(),
            )
        with _running(_Pass(params)) as run:
            result = self.function(*inputs, **more)
        problems = list(run.problems.values())
        problems += [
            f"{path}: is given, and the model has no such parameter; {nearest(path, run.declared)}"
            for path in params
            if path not in run.declared
        ]
        if problems:
            listed = "\n".join(f"  {problem}" for problem in problems)
            raise at(
                ShapeError(
                    f"the parameters given do not fit the model {self.__name__}\n{listed}\n"
                    "  model.specs(*inputs) lists what it has; model.init(key, *inputs) makes it"
                ),
                caller(),
            )
        return result


def model(function: Callable[..., Any]) -> Model:
    """A model: its function makes parameters with `md.param` where it uses them.

    >>> import meshdsl as md
    >>> @md.model
    ... def mlp(x):
    ...     h = md.relu(md.einsum(x, md.param("w", "io:4 hidden:16"), out="batch hidden"))
    ...     return md.einsum(h, md.param("v", "hidden:16 io:4"), out="batch io")
    >>> x = md.tensor([[1.0, 2.0, 3.0, 4.0]], "batch io")
    >>> params = mlp.init(md.random.key(0), x)
    >>> {path: p.dims for path, p in params.items()}
    {'w': (io=4, hidden=16), 'v': (hidden=16, io=4)}
    >>> mlp(params, x).dims
    (batch=1, io=4)
    """
    return Model(function)


def path_hash(path: str) -> int:
    """A number below 2**32 that depends on the path alone, on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big")


def eval_shape(f: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """The types of f's results; nothing is computed.

    >>> import meshdsl as md
    >>> md.eval_shape(lambda x: md.sum(x, "batch"), md.spec("batch:8 io:4"))
    float32[io=4]

    Tensors and specs among the arguments count by their types; other leaves are passed as they are.
    """
    leaves, structure = tree.tree_flatten((args, named))
    abstract = [isinstance(x, Tensor | Type) for x in leaves]

    def flat(*xs: Tensor) -> Any:
        given = iter(xs)
        full = [next(given) if on else x for x, on in zip(leaves, abstract, strict=True)]
        args, named = tree.tree_unflatten(structure, full)
        return f(*args, **named)

    specs = [x.type if isinstance(x, Tensor) else x for x, on in zip(leaves, abstract, strict=True) if on]
    graph, _, out = trace(flat, specs)
    return tree.tree_unflatten(out, [v.type for v in graph.outs])


def layers(
    f: Callable[..., Any],
    x: Any,
    over: DimLike,
    *,
    xs: Any = None,
    remat: bool | str = False,
    collect: bool = False,
) -> Any:
    """Run `x = f(x)` once for each index of `over`, as one scan whose parameters are stacked along it.

    >>> import meshdsl as md
    >>> def f(x):
    ...     return md.relu(x * md.param("scale", "io:4", init=md.init.ones()))
    >>> model = md.model(lambda x: md.layers(f, x, over=md.Dim("layer", 3)))
    >>> model.specs(md.spec("batch:2 io:4"))
    {'scale': float32[layer=3 io=4]}

    The graph has the size of one layer, whatever their number. With `xs` (a pytree of tensors that have the dim), f
    also gets its slice, `f(x, slice)`. With `remat`, the gradient computes each layer again from its input instead of
    keeping what is inside (rematerialisation); a text is the policy of md.checkpoint. With `collect`, f returns a pair,
    x and what to collect, and the result is a pair too: the last x, and all that was collected, stacked along `over`
    (a decoder's caches). Raises `ShapeError` when f changes the dims or dtype of x.
    """
    run = _run("md.layers")
    try:
        dim = pick(over, [d for leaf in tree.tree_leaves(xs)[:1] for d in leaf.dims], new=True)[0]
    except MeshdslError as error:
        raise at(error, caller()) from None
    has_slices = xs is not None

    def one(carry: Any, row: Any) -> Any:
        result = f(carry, row) if has_slices else f(carry)
        return result if collect else (result, None)

    declared = _declared_by(run, dim, one, x, xs)
    if run.values is None:
        _declare(run, declared)
        if not collect:
            return x
        rows = tree.tree_map(lambda leaf: Type(tuple(d for d in leaf.dims if d != dim), leaf.dtype), xs)
        inner = dataclasses.replace(run, declared={}, problems={}, stacked=(*run.stacked, dim))

        def collected(x: Any, row: Any) -> Any:
            with _running(inner):
                return one(x, row)[1]

        return x, tree.tree_map(lambda t: zeros(Type((dim, *t.shape), t.dtype)), eval_shape(collected, x, rows))
    weights = {
        path: run.slices[path] if path in run.slices else _value(run, path, d.type) for path, d in declared.items()
    }

    def step(carry: Any, rows: tuple[Any, dict[str, Tensor]]) -> Any:
        def apply(carry: Any, row: Any, slices: dict[str, Tensor]) -> Any:
            inner = dataclasses.replace(run, declared={}, problems={}, stacked=(*run.stacked, dim), slices=slices)
            with _running(inner):
                return one(carry, row)

        policy = remat if isinstance(remat, str) else "nothing"
        return (checkpoint(apply, policy) if remat else apply)(carry, *rows)

    last, collected = scan(step, x, (xs, weights), over=dim)
    _declare(run, declared)
    return (last, collected) if collect else last


def _declared_by(run: _Pass, dim: Dim, one: Callable[..., Any], x: Any, xs: Any) -> dict[str, Declared]:
    """What one layer declares, with the dim of the layers in front."""
    inner = _Pass(None, path=run.path, stacked=(*run.stacked, dim))
    rows = tree.tree_map(lambda leaf: Type(tuple(d for d in leaf.dims if d != dim), leaf.dtype), xs)

    def discover(x: Any, row: Any) -> Any:
        with _running(inner):
            return one(x, row)[0]

    before, after = (tree.tree_leaves(eval_shape(g, x, rows)) for g in (lambda x, row: x, discover))
    if [(set(t.shape), t.dtype) for t in before] != [(set(t.shape), t.dtype) for t in after]:
        raise at(
            ShapeError(
                f"a layer of md.layers changes its input: {_types(before)} goes in and {_types(after)} comes out\n"
                "  the result of one layer is the input of the next, so both have the same dims and dtype"
            ),
            caller(),
        )
    return inner.declared


def _declare(run: _Pass, declared: Mapping[str, Declared]) -> None:
    for path, d in declared.items():
        if path in run.declared:
            raise at(
                ShapeError(
                    f"the parameter {path!r} is made twice\n"
                    f"  it is there already, from {run.declared[path].where}, and again inside md.layers\n"
                    "  put one of them in its own md.scope"
                ),
                d.where,
            )
        run.declared[path] = d


def _types(types: list[Type]) -> str:
    return ", ".join(f"{t.dtype.name}{show(t.shape)}" for t in types)
