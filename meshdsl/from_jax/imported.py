"""`md.from_jax` and what it returns: a JAX function as a function of tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import meshdsl as md
from meshdsl import jax_functions

from .axes import dims
from .naming import Names, given, settle
from .operations import new_replay
from .steps import Block, Value, read
from .tensors import in_axes, in_dims, numbered, spec_of, stored
from .unions import unify
from .workload import workload_of

tree = jax.tree_util
_Type = type(md.spec())


def from_jax(f: Callable[..., Any], *args: Any, names: Mapping[str, str] | None = None, prefer: str = "") -> Imported:
    """A JAX function as a function of tensors with named dims; nothing in it is rewritten.

    >>> import jax.numpy as jnp
    >>> import meshdsl as md
    >>> def loss(params, x):
    ...     return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - x) ** 2)
    >>> params = {"w1": jnp.ones((4, 6)), "w2": jnp.ones((6, 4))}
    >>> m = md.from_jax(loss, params, jnp.ones((8, 4)), names={"x": "batch model", "*/w1": "model hidden"})
    >>> m.dims
    {'model': 4, 'hidden': 6, 'batch': 8}
    >>> compiled = md.compile(md.value_and_grad(m), "rows:2 cols:2", "batch:rows; hidden:cols")
    >>> [str(record.op) for record in compiled.program(*m.specs).collectives][:1]
    ['all_reduce(sum) over cols']

    `args` are arrays or `jax.ShapeDtypeStruct`s, in any pytrees; leaves that are no arrays, such as activation
    functions and Python numbers, stay as they are. `names` gives names to axes, by a pattern (as of a shell) of the
    path of an input: one word for each axis, `.` for no name, `a*b` for an axis that merges two dims. The first pattern
    that fits an input counts. `md.named` names arrays inside the function. Dims that follow from these have the same
    names everywhere; what nobody named gets a made-up name, which `print(m)` lists with its place. `prefer` is an order
    of dims: where the layout maps several dims of a product to one mesh axis, the first one gets it.

    Raises `TraceError` with everything that cannot be imported, each with its primitive, line and a way out, and
    `ShapeError` for names that do not fit.
    """
    return Imported(f, args, dict(names or {}), tuple(prefer.split()))


def is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


class Imported:
    """A JAX function as a function of tensors; the result of `md.from_jax`. `print` shows its dims.

    >>> import jax.numpy as jnp
    >>> import meshdsl as md
    >>> x, w = jnp.ones((4, 2)), jnp.ones((2, 3))
    >>> m = md.from_jax(lambda x, w: x @ w, x, w, names={"x": "batch io", "w": ". hidden"})
    >>> m.specs
    (float32[batch=4 io=2], float32[io=2 hidden=3])
    >>> m(*m.tensors(x, w)).dims
    (batch=4, hidden=3)
    >>> md.jaxify(md.compile(m, "rows:4", "batch:rows"))(x, w).shape
    (4, 3)

    `specs` are the types of its arguments; `dims` the size of each dim. `tensors(*arrays)` and `arrays(result)`
    go from arrays to tensors and back.
    """

    def __init__(self, f: Callable[..., Any], args: Sequence[Any], names: Mapping[str, str], prefer: Sequence[str]):
        self._f, self._patterns, self.prefer = f, names, prefer
        functools.update_wrapper(self, f, updated=())
        leaves, self._structure = tree.tree_flatten(tuple(args))
        self._static = {i: x for i, x in enumerate(leaves) if not is_array(x)}
        self._arrays = [x for x in leaves if is_array(x)]
        self._block, self._out_structure = self._traced(args, leaves)
        self._others: dict[Any, Imported] = {}
        self._names = Names()
        given(self._block, names, self._names)
        unify(self._block)
        settle(self._block, self._names)
        if self._names.problems:
            raise md.ShapeError("\n".join(self._names.problems))
        self._check()

    def _traced(self, args: Sequence[Any], leaves: Sequence[Any]) -> tuple[Block, Any]:
        arrays = [x for x in leaves if is_array(x)]

        def flat(*arrays: Any) -> Any:
            moving = iter(arrays)
            full = [self._static[i] if i in self._static else next(moving) for i in range(len(leaves))]
            return self._f(*tree.tree_unflatten(self._structure, full))

        jaxpr, shape = jax.make_jaxpr(flat, return_shape=True)(*arrays)
        block = read(jaxpr)
        paths = [path for path, x in tree.tree_leaves_with_path(tuple(args)) if is_array(x)]
        parameters = _parameters(self._f)
        for value, path in zip(block.ins, paths, strict=True):
            value.label = _label(parameters, path)
        return block, tree.tree_structure(shape)

    def _check(self) -> None:
        """Run the function on types, and report everything that cannot be imported."""
        replay = new_replay(self.prefer)
        with numbered():
            md.eval_shape(lambda *xs: replay.run(self._block, xs), *(spec_of(v) for v in self._block.ins))
        self._names.notes += replay.notes
        if replay.refusals:
            listed = "\n".join(dict.fromkeys(replay.refusals))
            raise md.TraceError(f"md.from_jax cannot import {getattr(self._f, '__name__', 'the function')}:\n{listed}")

    def __call__(self, *trees: Any) -> Any:
        """The function's result for tensors: a pytree of tensors, in the structure that the function returns."""
        tensors = [x for x in tree.tree_leaves(trees) if isinstance(x, md.Tensor)]
        if len(tensors) != len(self._block.ins):
            raise md.ShapeError(
                f"{self._called()} takes {len(self._block.ins)} tensors, got {len(tensors)}\n"
                "  make them with .tensors(*arrays); .specs has their types"
            )
        shapes = self._shapes(tensors)
        if shapes != tuple(v.shape for v in self._block.ins):
            return self._resized(shapes)(*trees)
        with numbered():
            outs = self._operations(*tensors)
        return tree.tree_unflatten(self._out_structure, outs)

    def _operations(self, *tensors: md.Tensor) -> Any:
        return jax_functions.with_operations(lambda *xs: new_replay(self.prefer).run(self._block, xs))(*tensors)

    def _shapes(self, tensors: Sequence[md.Tensor]) -> tuple[tuple[int, ...], ...]:
        """The shapes of the arrays that tensors stand for: their dims may have other sizes, as in a micro-batch."""
        shapes: list[tuple[int, ...]] = []
        for v, t in zip(self._block.ins, tensors, strict=True):
            sizes = {d.name: d.size for d in t.dims}
            missing = [d.name for d in dims(v.axes) if d.name not in sizes]
            if missing:
                raise md.ShapeError(f"the tensor of {v.label} lacks the dim {missing[0]!r}; it is {t.type}")
            shapes.append(tuple(int(np.prod([sizes[d.name] for d in dims([a])])) for a in v.axes))
        return tuple(shapes)

    def _resized(self, shapes: tuple[tuple[int, ...], ...]) -> Imported:
        """The function imported for arrays of other shapes, as `jax.jit` would trace it again."""
        if shapes not in self._others:
            structs = iter(jax.ShapeDtypeStruct(s, v.dtype) for s, v in zip(shapes, self._block.ins, strict=True))
            full = [self._static[i] if i in self._static else next(structs) for i in range(self._structure.num_leaves)]
            args = tree.tree_unflatten(self._structure, full)
            self._others[shapes] = Imported(self._f, args, self._patterns, self.prefer)
        return self._others[shapes]

    def _called(self) -> str:
        return getattr(self._f, "__name__", "the imported function")

    @property
    def dims(self) -> dict[str, Any]:
        """The size of each dim, or its sizes, in the order of first use."""
        return {name: sizes[0] if len(sizes) == 1 else tuple(sizes) for name, sizes in self._names.dims.items()}

    @property
    def specs(self) -> tuple[Any, ...]:
        """The types of the arguments, in their structure; leaves that are no arrays are None."""
        return self._unflatten([spec_of(v) for v in self._block.ins])

    @property
    def labels(self) -> list[str]:
        """The path of each array of the arguments, such as `params/w`."""
        return [v.label for v in self._block.ins]

    @property
    def examples(self) -> list[Any]:
        """The arrays that were imported, with one axis for each dim; None for a type."""
        return [in_dims(v, x) for v, x in zip(self._block.ins, self._arrays, strict=True)]

    @property
    def first_count(self) -> int:
        """How many arrays the first argument has."""
        return sum(isinstance(x, md.Tensor | _Type) for x in tree.tree_leaves(self.specs[:1]))

    @property
    def result_dims(self) -> list[tuple[md.Dim, ...]]:
        """The dims of each result."""
        return [stored(v) for v in self._block.outs]

    def workload(self, name: str = "") -> md.Workload:
        """The loss as a `md.Workload`, which `meshdsl analyze file.py:name` and the other commands take.

        The first argument are the parameters, the others a batch, and the optimizer is `md.optim.adamw(1e-3)`. Raises
        `ShapeError` for a function that returns anything but a scalar.
        """
        return workload_of(self, name or self._called())

    def split(self, *args: Any) -> list[Any]:
        """The arguments as arrays with one axis for each dim, in the order of `specs`.

        Raises `ShapeError` for another structure, and for an array of another shape.
        """
        leaves, structure = tree.tree_flatten(args)
        arrays = [x for x in leaves if is_array(x)]
        if structure != self._structure or len(arrays) != len(self._block.ins):
            raise md.ShapeError(f"{self._called()} was imported for {self._structure}, and these are {structure}")
        for i, x in self._static.items():
            if not (leaves[i] is x or leaves[i] == x):
                raise md.ShapeError(
                    f"{self._called()} was imported with {x!r}, and this is {leaves[i]!r}\n"
                    "  import it again, or pass an array: jnp.asarray(x)"
                )
        for v, x in zip(self._block.ins, arrays, strict=True):
            if np.shape(x) != v.shape:
                raise md.ShapeError(f"{v.label} has the shape {v.shape}, got {np.shape(x)}")
        return [in_dims(v, x) for v, x in zip(self._block.ins, arrays, strict=True)]

    def joined(self, arrays: Sequence[Any], shapes: Sequence[Sequence[md.Dim]], structure: Any) -> Any:
        """Arrays with these dims as a tree of arrays in the axes of JAX: the function's own, if it returns such a tree.

        In another tree, such as that of a gradient, an array has the axes of the input with the same dims.
        """
        values = self._values_like(tree.tree_unflatten(structure, range(len(arrays))), shapes)
        made = [x if v is None else in_axes(x, shape, v) for x, shape, v in zip(arrays, shapes, values, strict=True)]
        return tree.tree_unflatten(structure, made)

    def _values_like(self, numbers: Any, shapes: Sequence[Sequence[md.Dim]]) -> list[Value | None]:
        """A value with the same dims for each number in a tree: of results, or of arguments, where a subtree is one."""
        rest, found = iter(self._block.ins), list[Value | None]([None] * len(shapes))
        known = [(tree.tree_structure(arg), [next(rest) for _ in tree.tree_leaves(arg)]) for arg in self.specs]
        known.insert(0, (self._out_structure, self._block.outs))

        def walk(node: Any) -> None:
            own, structure = tree.tree_flatten(node)
            for other, values in known:
                if structure == other and all(
                    set(stored(v)) == set(shapes[i]) for i, v in zip(own, values, strict=True)
                ):
                    for i, v in zip(own, values, strict=True):
                        found[i] = v
                    return
            if isinstance(node, tuple | list | dict):
                for each in node.values() if isinstance(node, dict) else node:
                    walk(each)
            else:
                for i in own:
                    found[i] = self._value_of(shapes[i])

        walk(numbers)
        return found

    def _value_of(self, shape: Sequence[md.Dim]) -> Value | None:
        """The input with these dims, in this order if there is one; else a result with them."""
        known = [v for v in (*self._block.ins, *self._block.outs) if set(stored(v)) == set(shape)]
        return next((v for v in known if stored(v) == tuple(shape)), known[0] if known else None)

    def tensors(self, *args: Any) -> tuple[Any, ...]:
        """Arrays as the tensors of the arguments; a `jax.ShapeDtypeStruct` becomes a spec.

        Raises `ShapeError` for another structure, and for an array of another shape.
        """
        made = zip(self._block.ins, self.split(*args), strict=True)
        return self._unflatten([spec_of(v) if x is None else md.tensor(x, stored(v)) for v, x in made])

    def arrays(self, result: Any, like: Any = None) -> Any:
        """Tensors as arrays in the axes of JAX: those of what the function returns, for a tree such as it returns.

        In another tree, such as that of a gradient, a tensor has the axes of the input with the same dims; or those of
        the tree `like`, of arrays or their types. Raises `ShapeError` if the trees differ.
        """
        tensors, structure = tree.tree_flatten(result, is_leaf=lambda x: isinstance(x, md.Tensor))
        made = self.joined([t.array for t in tensors], [t.dims for t in tensors], structure)
        if like is None:
            return made
        shapes = [np.shape(x) for x in tree.tree_leaves(like) if is_array(x)]
        if len(shapes) != len(tensors):
            raise md.ShapeError(f"there are {len(tensors)} tensors, and like= has {len(shapes)} arrays")
        return tree.tree_unflatten(structure, list(map(jax.numpy.reshape, tree.tree_leaves(made), shapes)))

    def _unflatten(self, values: Sequence[Any]) -> tuple[Any, ...]:
        rest = iter(values)
        full = [None if i in self._static else next(rest) for i in range(self._structure.num_leaves)]
        return tree.tree_unflatten(self._structure, full)

    def __str__(self) -> str:
        shown = " ".join(f"{name}:{'|'.join(map(str, sizes))}" for name, sizes in self._names.dims.items())
        lines = [f"{self._called()}: {len(self._block.ins)} arrays, dims {shown}"]
        if self._names.made_up:
            lines.append("dims that nobody named (names={...} or md.named gives them a name):")
            lines += [f"  {name}:{size}  {place}" for name, size, place in self._names.made_up]
        return "\n".join([*lines, *(["notes:"] if self._names.notes else []), *(f"  {n}" for n in self._names.notes)])

    __repr__ = __str__


def _parameters(f: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(f).parameters)
    except (TypeError, ValueError):
        return []


def _label(parameters: Sequence[str], path: Any) -> str:
    """The path of an input, such as `params/layers/0/w`."""
    first, *rest = path
    if rest and getattr(rest[-1], "name", "") in ("value", "raw_value"):  # of a Flax variable, which is an array
        rest = rest[:-1]
    keys = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))).lstrip(".") for k in rest]
    return "/".join([*parameters, *map(str, range(len(parameters), first.idx + 1))][first.idx : first.idx + 1] + keys)
