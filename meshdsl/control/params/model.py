"""Models: functions that create their parameters with `md.param`. Parameters are stored in a flat dict, path -> tensor.

The same function is used to initialise and to apply the model. `Model.init` traces it on the types of its inputs to
find its parameters, and draws each one from a key folded with a hash of its path. Adding, removing or moving a
parameter therefore does not change the initial values of the others.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import ShapeError, at, expect, nearest
from ...errors.markup import page_part
from ...ir import Type
from ...ops import random
from ...ops.dtypes import as_dtype
from ...trace import Tensor, eval_shape, tree
from .param import Declared, ModelRun, computed, running


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
        return Model(self.function, as_dtype(dtype))

    def _apply(self, *inputs: Any, **kwargs: Any) -> Any:
        dtype = self.compute
        if dtype is None:
            return self.function(*inputs, **kwargs)
        inputs, kwargs = tree.tree_map(lambda x: computed(x, dtype), (inputs, kwargs))
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
            raise ShapeError(
                f"the first argument of a model must be a dict of parameters, got {type(params).__name__}\n"
                "  params = model.init(key, *inputs); then model(params, *inputs)"
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
            raise ShapeError(
                f"the parameters do not match the model {self.__name__}\n{listed}\n"
                "  model.specs(*inputs) lists its parameters; model.init(key, *inputs) creates them"
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
    return Model(expect("function", function, Callable))


def path_hash(path: str) -> int:
    """A hash of the path below 2**32, equal on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big")
