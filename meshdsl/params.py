"""Models: functions that create their parameters with `md.param`. Parameters are stored in a flat dict, path -> tensor.

The same function is used to initialise and to apply the model. `Model.init` traces it on the types of its inputs to
find its parameters, and draws each one from a key folded with a hash of its path. Adding, removing or moving a
parameter therefore does not change the initial values of the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import init as initializers
from .autodiff import zeros
from .dims import DimsLike, Shape, pick
from .display.markup import page_part
from .errors import MeshdslError, ShapeError, TraceError, Where, at, caller, located, nearest, raised
from .ir import Type
from .ops import random
from .ops.dtypes import as_dtype, cast, kind
from .trace import Tensor, dtype_of, trace, tree

__all__ = [
    "Declared",
    "Model",
    "ModelRun",
    "current_run",
    "eval_shape",
    "model",
    "param",
    "running",
    "running_model",
    "scope",
    "value_of",
]


@dataclass(frozen=True)
class Declared:
    """The declaration of a parameter by `md.param`; `dims` start with the dims of the enclosing `md.layers`."""

    dims: Shape
    dtype: np.dtype
    init: Callable[..., Tensor]
    where: Where

    @property
    def type(self) -> Type:
        return Type(self.dims, self.dtype)


@dataclass
class ModelRun:
    """One run of a model's function: the parameters declared so far, and their values (None during discovery)."""

    values: Mapping[str, Any] | None
    declared: dict[str, Declared] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    stacked: Shape = ()
    slices: dict[str, Tensor] = field(default_factory=dict)  # inside `layers`: this layer's slice of each parameter
    compute: np.dtype | None = None  # the dtype that `md.param` returns floats in; they are stored in their own


class _State(threading.local):
    run: ModelRun | None = None


_state = _State()


@contextlib.contextmanager
def running(run: ModelRun) -> Iterator[ModelRun]:
    """Make `run` the running model inside a `with` block."""
    previous, _state.run = _state.run, run
    try:
        yield run
    except MeshdslError as error:  # add the line that called the layer
        raise at(error, raised(error) or caller()) from None
    finally:
        _state.run = previous


def current_run() -> ModelRun | None:
    """The model run in progress, or None."""
    return _state.run


def running_model(name: str) -> ModelRun:
    """The model run in progress, for the public function `name`; raises `TraceError` outside a model."""
    if _state.run is None:
        raise at(
            TraceError(
                f"{name} is used outside a model\n"
                "  parameters belong to a model, and no model's function is running\n"
                "  wrap the function: model = md.model(f); then model.init(key, *inputs) and model(params, *inputs)"
            ),
            caller(),
        )
    return _state.run


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Prefixes the paths of parameters created inside with `name/`.

    >>> import meshdsl as md
    >>> def f(x):
    ...     with md.scope("layer"):
    ...         return x * md.param("scale", "io:3", init=md.init.ones())
    >>> md.model(f).specs(md.spec("io:3"))
    {'layer/scale': float32[io=3]}

    Raises `ShapeError` for a name that is not a Python identifier, and `TraceError` outside a model.
    """
    run = running_model(f"md.scope({name!r})")
    _check_name(name, "scope")
    previous = run.path
    run.path = (*previous, name)
    try:
        yield
    finally:
        run.path = previous


def _check_name(name: str, kind: str) -> None:
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split("/")):
        raise at(
            ShapeError(
                f"a {kind} name must be a Python identifier, got {name!r}\n"
                "  names form paths such as 'layer/w', which layouts and checkpoints use"
            ),
            caller(),
        )


def param(name: str, dims: DimsLike, init: Callable[..., Tensor] | None = None, dtype: Any = "float32") -> Tensor:
    """Creates or looks up the parameter `name` of the running model, in the current scope.

    >>> import meshdsl as md
    >>> model = md.model(lambda x: md.einsum(x, md.param("w", "io:2 hidden:4"), out="batch hidden"))
    >>> params = model.init(md.random.key(0), md.spec("batch:8 io:2"))
    >>> params["w"].dims
    (io=2, hidden=4)

    `init(key, dims, dtype)` returns its initial value (default `md.init.normal(0.02)`); see `md.init`. Inside
    `md.layers`, the parameters of all layers are stored as one tensor with the layer dim first, and the result is the
    current layer's slice. Raises `ShapeError` if the path is already used, and `TraceError` outside a model.
    """
    run = running_model(f"md.param({name!r})")
    _check_name(name, "parameter")
    path = "/".join((*run.path, name))
    try:
        shape = pick(dims, (), new=True)
        full_type = Type((*run.stacked, *shape), dtype_of(dtype))
        if path in run.declared:
            raise ShapeError(
                f"the parameter {path!r} is created twice\n"
                f"  the first is at {run.declared[path].where}\n"
                "  to share it, create it once and use the tensor twice; for two parameters, put one in an md.scope"
            )
    except MeshdslError as error:
        raise at(error, caller()) from None
    run.declared[path] = Declared(full_type.shape, full_type.dtype, init or initializers.normal(0.02), caller())
    if path in run.slices:
        value = run.slices[path]
    else:
        value = zeros(Type(shape, full_type.dtype)) if run.values is None else value_of(run, path, full_type)
    return value if run.compute is None else _computed(value, run.compute)


def _computed(x: Any, dtype: np.dtype) -> Any:
    """A floating tensor in another dtype; anything else unchanged."""
    return cast(x, dtype) if isinstance(x, Tensor) and kind(x.dtype) == "f" else x


def value_of(run: ModelRun, path: str, full_type: Type) -> Tensor:
    """The tensor given for a path. Problems are recorded, and reported together for all parameters at the end."""
    assert run.values is not None
    value = run.values.get(path)
    if value is None:
        run.problems[path] = f"{path}: is missing; expected {full_type}"
    elif not isinstance(value, Tensor):
        run.problems[path] = f"{path}: is a {type(value).__name__}, not a tensor; expected {full_type}"
    elif value.type != full_type:
        run.problems[path] = f"{path}: has type {value.type}; expected {full_type}"
    else:
        return value
    return zeros(full_type)


@dataclass(frozen=True)
class Model:
    """A function with parameters, created by `md.model`. `specs` and `init` return the parameters; a call takes them.

    >>> import meshdsl as md
    >>> scaled = md.model(lambda x: x * md.param("scale", "io:3", init=md.init.constant(2.0)))
    >>> x = md.tensor([1.0, 2.0, 3.0], "io")
    >>> params = scaled.init(md.random.key(0), x)
    >>> params, scaled(params, x)
    ({'scale': tensor(float32[io=3], [2. 2. 2.])}, tensor(float32[io=3], [2. 4. 6.]))
    """

    function: Callable[..., Any]
    compute: np.dtype | None = None

    def astype(self, dtype: Any) -> Model:
        """The model that computes in another dtype: floating parameters and inputs are cast to it.

        >>> import meshdsl as md
        >>> model = md.model(lambda x: md.einsum(x, md.param("w", "io:3"), out="batch")).astype("bfloat16")
        >>> x = md.spec("batch:2 io:3")
        >>> model.specs(x), md.eval_shape(model, model.specs(x), x)
        ({'w': float32[io=3]}, bfloat16[batch=2])

        Parameters are stored in their own dtype, and so are their gradients: mixed precision in one line. Losses and
        norms that need more bits cast what they read to float32, or are outside the model. Layers of `md.nn` have
        `precision=` for that.
        """
        return Model(self.function, located(lambda: as_dtype(dtype)))

    def _apply(self, *inputs: Any, **kwargs: Any) -> Any:
        dtype = self.compute
        if dtype is None:
            return self.function(*inputs, **kwargs)
        inputs, kwargs = tree.tree_map(lambda x: _computed(x, dtype), (inputs, kwargs))
        return self.function(*inputs, **kwargs)

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", "model")

    def __repr__(self) -> str:
        return f"<model {self.__name__}({', '.join(self._inputs())})>"

    def _inputs(self) -> list[str]:
        try:
            return list(inspect.signature(self.function).parameters)
        except (TypeError, ValueError):  # a built-in function
            return ["..."]

    def _repr_html_(self) -> str:
        text = "\n".join([f"model.specs({', '.join(self._inputs())})    the parameters",
                          f"model.init({', '.join(['key', *self._inputs()])})    their initial values",
                          f"model({', '.join(['params', *self._inputs()])})    the result"])  # fmt: skip
        return page_part(repr(self)[1:-1], text)

    def declarations(self, *inputs: Any, **kwargs: Any) -> dict[str, Declared]:
        """The declarations of all parameters for inputs of these types, by path, in the order of creation."""
        run = ModelRun(None, compute=self.compute)

        def discover(*args: Any, **kwargs: Any) -> Any:
            with running(run):
                return self._apply(*args, **kwargs)

        eval_shape(discover, *inputs, **kwargs)
        return run.declared

    def specs(self, *inputs: Any, **kwargs: Any) -> dict[str, Type]:
        """The type of each parameter, by path, without computing anything. Inputs may be specs.

        >>> import meshdsl as md
        >>> md.model(lambda x: x * md.param("scale", "io:3")).specs(md.spec("batch:8 io:3"))
        {'scale': float32[io=3]}
        """
        return {path: d.type for path, d in self.declarations(*inputs, **kwargs).items()}

    def init(self, key: Tensor, *inputs: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Initial parameters, by path. Only the types of the inputs are used; they may be specs.

        It can be compiled: with `md.compile(model.init, mesh, layout)(key, *inputs)`, each device draws its own shard,
        and no device or host stores a whole sharded parameter. Raises `ShapeError` if an initialiser returns a tensor
        of another type than the parameter's.
        """
        params = {}
        for path, d in self.declarations(*inputs, **kwargs).items():
            x = d.init(random.fold_in(key, path_hash(path)), d.dims, d.dtype)
            if not isinstance(x, Tensor) or x.type != d.type:
                returned = x.type if isinstance(x, Tensor) else type(x).__name__
                raise at(
                    ShapeError(
                        f"the init of parameter {path!r} returned {returned}, but the parameter is {d.type}\n"
                        "  pass a function (key, dims, dtype) -> tensor, for example md.init.normal(0.02)"
                    ),
                    d.where,
                )
            params[path] = x
        return params

    def __call__(self, params: Mapping[str, Tensor], *inputs: Any, **kwargs: Any) -> Any:
        """Apply the function with these parameters.

        Raises `ShapeError` listing all parameters that are missing, unknown or of another type.
        """
        if not isinstance(params, Mapping):
            raise at(
                ShapeError(
                    f"the first argument of a model must be a dict of parameters, got {type(params).__name__}\n"
                    "  params = model.init(key, *inputs); then model(params, *inputs)"
                ),
                caller(),
            )
        with running(ModelRun(params, compute=self.compute)) as run:
            result = self._apply(*inputs, **kwargs)
        problems = list(run.problems.values())
        problems += [
            f"{path}: the model has no such parameter; {nearest(path, run.declared)}"
            for path in params
            if path not in run.declared
        ]
        if problems:
            listed = "\n".join(f"  {problem}" for problem in problems)
            raise at(
                ShapeError(
                    f"the parameters do not match the model {self.__name__}\n{listed}\n"
                    "  model.specs(*inputs) lists its parameters; model.init(key, *inputs) creates them"
                ),
                caller(),
            )
        return result


def model(function: Callable[..., Any]) -> Model:
    """Turns a function that creates its parameters with `md.param` into a `Model`.

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
    """A hash of the path below 2**32, equal on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big")


def eval_shape(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The types of f's results, without computing anything.

    >>> import meshdsl as md
    >>> md.eval_shape(lambda x: md.sum(x, "batch"), md.spec("batch:8 io:4"))
    float32[io=4]

    Arguments may be tensors or specs; other leaves are passed unchanged.
    """
    leaves, structure = tree.tree_flatten((args, kwargs))
    abstract = [isinstance(x, Tensor | Type) for x in leaves]

    def flat(*xs: Tensor) -> Any:
        tensors = iter(xs)
        full = [next(tensors) if on else x for x, on in zip(leaves, abstract, strict=True)]
        args, kwargs = tree.tree_unflatten(structure, full)
        return f(*args, **kwargs)

    specs = [x.type if isinstance(x, Tensor) else x for x, on in zip(leaves, abstract, strict=True) if on]
    graph, _, out = trace(flat, specs)
    return tree.tree_unflatten(out, [v.type for v in graph.outs])
