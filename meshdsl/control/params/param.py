"""`md.param` and `md.scope`: the parameters that a model's function declares while it runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...dims import DimsLike, Shape, pick
from ...errors import ShapeError, TraceError, Where, caller, expect
from ...ir import Type
from ...ops.creation import zeros_like
from ...ops.dtypes import cast, kind
from ...trace import Tensor, dtype_of
from . import init as initializers


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
    finally:
        _state.run = previous


def current_run() -> ModelRun | None:
    """The model run in progress, or None."""
    return _state.run


def running_model(name: str) -> ModelRun:
    """The model run in progress, for the public function `name`; raises `TraceError` outside a model."""
    if _state.run is None:
        raise TraceError(
            f"{name} is used outside a model\n"
            "  parameters belong to a model, and no model's function is running\n"
            "  wrap the function: model = md.model(f); then model.init(key, *inputs) and model(params, *inputs)"
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
        raise ShapeError(
            f"a {kind} name must be a Python identifier, got {name!r}\n"
            "  names form paths such as 'layer/w', which layouts and checkpoints use"
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
    shape = pick(dims, (), new=True)
    if init is not None and init is getattr(initializers, getattr(init, "__name__", ""), None):
        made = f"md.init.{init.__name__}"
        raise ShapeError(f"init={made} makes an initialiser and is none itself\n  call it: init={made}(...)")
    if init is not None:
        expect("init", init, Callable)
    full_type = Type((*run.stacked, *shape), dtype_of(dtype))
    if path in run.declared:
        raise ShapeError(
            f"the parameter {path!r} is created twice\n"
            f"  the first is at {run.declared[path].where}\n"
            "  to share it, create it once and use the tensor twice; for two parameters, put one in an md.scope"
        )
    run.declared[path] = Declared(full_type.dims, full_type.dtype, init or initializers.normal(0.02), caller())
    if path in run.slices:
        value = run.slices[path]
    else:
        value = zeros_like(Type(shape, full_type.dtype)) if run.values is None else value_of(run, path, full_type)
    return value if run.compute is None else computed(value, run.compute)


def computed(x: Any, dtype: np.dtype) -> Any:
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
    return zeros_like(full_type)
