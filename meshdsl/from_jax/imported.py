"""`md.from_jax` and what it returns: a JAX function as a function of tensors."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import meshdsl as md
from meshdsl import jax_functions

from .arguments import Arguments, is_array
from .axes import dims, unite
from .hints import Hint, constraints, layout_of, mesh_axes, name_dims, words_of
from .layers import stack_layers
from .naming import Names, given, settle
from .proposals import data_dim, dims_to_shard, names_to_paste
from .replay import Replay
from .steps import OWN_RULES, BodyStep, OpenedJaxpr, Value, prune, read
from .tensors import in_axes, in_dims, numbered, spec_of, stored
from .unions import unify
from .workload import workload_of

tree = jax.tree_util


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
    that fits an input counts. A place, as `print(m)` writes it ("model.py:98 axis 2"), names one axis of what this line
    computes. `md.named` names arrays inside the function. Dims that follow from these have the same
    names everywhere; what nobody named gets a made-up name, which `print(m)` lists with its place. `prefer` is an order
    of dims: where the layout maps several dims of a product to one mesh axis, the first one gets it.

    Raises `TraceError` with everything that cannot be imported, each with its primitive, line and a way out, and
    `ShapeError` for names that do not fit.
    """
    return Imported(f, args, dict(names or {}), tuple(prefer.split()))


@dataclass(frozen=True)
class _Form:
    """A tree of tensors that is known: its structure, a value for each leaf, and arrays in JAX's own structure."""

    structure: Any
    values: Sequence[Value]
    rebuilt: Callable[[Sequence[Any]], Any]

    @functools.cached_property
    def dims(self) -> list[tuple[md.Dim, ...]]:
        return [stored(v) for v in self.values]

    def has_dims(self, shapes: Sequence[Sequence[md.Dim]]) -> bool:
        """True if the leaves have these dims, in any order."""
        return all(set(own) == set(shape) for own, shape in zip(self.dims, shapes, strict=True))


def _merged_as(x: Any, shape: tuple[int, ...]) -> Any:
    """An array in this shape, in which neighbouring axes are merged or divided."""
    before, after = (set(itertools.accumulate(own, operator.mul)) for own in (x.shape, shape))
    runs = itertools.pairwise(sorted({1} | (before & after)))
    mixed = any(all(any(low < cut < high for cut in cuts) for cuts in (before, after)) for low, high in runs)
    if x.size != math.prod(shape) or (x.size and mixed):
        raise md.ShapeError(f"an array of shape {x.shape} cannot be like one of shape {shape}")
    return jax.numpy.reshape(x, shape)


def _gradient_of_jax(block: OpenedJaxpr) -> Iterator[BodyStep]:
    """The steps that `jax.grad` made; those of the rules of `jax.custom_vjp` do not count."""
    for step in block.steps:
        if step.transposed:
            yield step
            yield from (inner for body in step.bodies for inner in body.walk())
        elif step.primitive not in OWN_RULES:
            for body in step.bodies:
                yield from _gradient_of_jax(body)


def _dims_that_send_more(step: BodyStep) -> list[str]:
    """The dims along which JAX's form of a gradient sends more than ours: of a table whose rows are added to, of an
    image, and of keys beside queries, whose product is no `md.attention` there."""
    if step.primitive == "scatter-add":
        over = step.params["dimension_numbers"].scatter_dims_to_operand_dims
        return [d.name for d in dims(step.ins[0].axes[i] for i in over)]
    if step.primitive == "conv_general_dilated":
        return [d.name for d in dims(step.ins[0].axes[i] for i in step.params["dimension_numbers"].lhs_spec[2:])]
    values = (*step.ins, *step.outs) if step.primitive == "dot_general" else ()
    return [d.name for v in values for axis in v.axes if axis.root.beside for d in dims([axis.root.beside])]


def _note_on_gradient(steps: Sequence[BodyStep]) -> list[str]:
    """A note on the steps of a gradient that JAX made, with the places and dims where it sends more than ours."""
    places = [(f"{step.where} {step.primitive}", name) for step in steps for name in _dims_that_send_more(step)]
    listed = "".join(f"\n    {place}, if {name} is split" for place, name in dict.fromkeys(places))
    more = f" and sends more than ours here:{listed}" if listed else ""
    note = f"it has a gradient that JAX made, which micro-batches cannot cut{more}"
    return [f"{note}\n    import the loss, and let md.value_and_grad make the gradient"] if steps else []


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
    go from arrays to tensors and back. `layout` is what the function's own shardings are as a layout: the axes of a
    mesh in `jax.lax.with_sharding_constraint`, and on annotated or sharded arguments; empty without any.
    """

    def __init__(self, f: Callable[..., Any], args: Sequence[Any], names: Mapping[str, str], prefer: Sequence[str]):
        self._f, self._patterns, self.prefer = f, names, prefer
        functools.update_wrapper(self, f, updated=())
        self._arguments = own = Arguments(f, args)
        jaxpr, shape = jax.make_jaxpr(lambda *xs: f(*own.filled(xs)), return_shape=True)(*own.arrays)
        self._out_structure, self._block = tree.tree_structure(shape), read(jaxpr)
        for i, (value, label) in enumerate(zip(self._block.ins, own.labels, strict=True)):
            value.label, value.places = label, (i,)
        stack_layers(self._block)  # before and after, because the last layer has fewer results that are read
        prune(self._block)
        stack_layers(self._block)
        self._others: dict[Any, Imported] = {}
        self._names = Names()
        given(self._block, names, self._names)
        unify(self._block)
        if any(_gradient_of_jax(self._block)):
            self._unite_gradients(shape)
        hints, axes = self._hints()
        name_dims(self._block, hints, axes, self._names)
        settle(self._block, self._names, prefer)
        if self._names.problems:
            raise md.ShapeError("\n".join(self._names.problems))
        self.layout = layout_of(hints, axes, self._block.ins[: self._first_count])
        self._check()

    def _unite_gradients(self, shape: Any) -> None:
        """Make the axes of a gradient those of its parameters: a part of the result that is like the first argument."""
        first, numbers = self._arguments.structure.children()[0], iter(self._block.outs)
        parameter = {n: v.axes[1:] if v.is_stacked else v.axes for v in self._block.ins for n in v.places}
        for part in tree.tree_leaves(shape, is_leaf=lambda node: tree.tree_structure(node) == first):
            own = [next(numbers) for _ in tree.tree_leaves(part)]
            for n, v in enumerate(own if tree.tree_structure(part) == first else ()):
                if [a.size for a in parameter.get(n, ())] == list(v.shape):
                    list(map(unite, parameter[n], v.axes))

    def _hints(self) -> tuple[list[Hint], set[str]]:
        """Words for the axes of values, by annotations and constraints, and the axes of meshes among them."""
        own = self._arguments
        found = [(v, x) for v in self._block.ins for x in (own.annotations[v.places[0]], own.arrays[v.places[0]])]
        every = [*found, *constraints(self._block)]
        axes = {axis for _, x in every for axis in mesh_axes(x)}
        return [(v, [(), *words_of(x)] if v.is_stacked else words_of(x)) for v, x in every], axes

    def _check(self) -> None:
        """Run the function on types, and report everything that cannot be imported."""
        replay = Replay(self.prefer)
        with numbered():
            md.eval_shape(lambda *xs: replay.run(self._block, xs), *map(spec_of, self._block.ins))
        self._names.notes += replay.notes
        self._names.notes += _note_on_gradient(list(_gradient_of_jax(self._block)))
        if replay.refusals:
            listed = "\n".join(dict.fromkeys(replay.refusals))
            raise md.TraceError(f"md.from_jax cannot import {self._arguments.called}:\n{listed}")

    def __call__(self, *trees: Any) -> Any:
        """The function's result for tensors: a pytree of tensors, in the structure that the function returns."""
        tensors = [x for x in tree.tree_leaves(trees) if isinstance(x, md.Tensor)]
        if len(tensors) != len(self._block.ins):
            raise md.ShapeError(
                f"{self._arguments.called} takes {len(self._block.ins)} tensors, got {len(tensors)}\n"
                "  make them with .tensors(*arrays); .specs has their types"
            )
        shapes = self._shapes(tensors)
        if shapes != tuple(v.shape for v in self._block.ins):
            return self._resized(shapes)(*trees)
        with numbered():
            outs = self._operations(*tensors)
        return tree.tree_unflatten(self._out_structure, outs)

    def _operations(self, *tensors: md.Tensor) -> Any:
        return jax_functions.with_operations(lambda *xs: Replay(self.prefer).run(self._block, xs))(*tensors)

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
            structs: dict[int, Any] = {}
            for shape, v in zip(shapes, self._block.ins, strict=True):
                own = jax.ShapeDtypeStruct(shape[1:] if v.is_stacked else shape, v.dtype)
                structs.update(dict.fromkeys(v.places, own))
            args = self._arguments.filled([structs[i] for i in range(len(structs))])
            self._others[shapes] = Imported(self._f, args, self._patterns, self.prefer)
        return self._others[shapes]

    @property
    def dims(self) -> dict[str, Any]:
        """The size of each dim, or its sizes, in the order of first use."""
        return {name: sizes[0] if len(sizes) == 1 else tuple(sizes) for name, sizes in self._names.dims.items()}

    @property
    def specs(self) -> tuple[Any, ...]:
        """The types of the arguments, in their structure.

        Leaves that are no arrays are None. Equal layers are one type, at the place of the first layer, with a dim
        `layer`; those of the other layers are None.
        """
        return self._arguments.placed({v.places[0]: spec_of(v) for v in self._block.ins})

    @property
    def is_loss(self) -> bool:
        """True if the function returns one scalar, as a workload does."""
        return [stored(v) for v in self._block.outs] == [()]

    @property
    def _first_count(self) -> int:
        """The number of tensors in the first argument."""
        return len(tree.tree_leaves(self.specs[:1]))

    def names_to_paste(self) -> dict[str, str]:
        """`names` for the dims that nobody named, of data and large weights: a start to edit, by what the function does
        with each.

        >>> import jax.numpy as jnp
        >>> import meshdsl as md
        >>> def loss(params, tokens):
        ...     return jnp.mean(jnp.tanh(params["embed"][tokens] @ params["w"]) ** 2)
        >>> params = {"embed": jnp.ones((9, 4)), "w": jnp.ones((4, 6))}
        >>> m = md.from_jax(loss, params, jnp.zeros((8, 5), int))
        >>> m.names_to_paste()
        {'tokens': 'batch length', '*/embed': 'vocab model', '*/w': 'model hidden'}
        """
        return names_to_paste(self._block, self._names, self._first_count)

    def dims_to_shard(self) -> list[str]:
        """The dims that `meshdsl search` splits: those that the user named; without any, those of data and large
        weights."""
        return dims_to_shard(self._block, self._names, self._first_count)

    def fsdp(self, axis: str) -> str:
        """The layout of plain FSDP over one mesh axis; empty if the data share no dim."""
        batch = data_dim(self._block, self._first_count)
        return f"{batch}:{axis}; params:{axis}" if batch else ""

    def workload(self, name: str = "") -> md.Workload:
        """The loss as a `md.Workload`, which `meshdsl analyze file.py:name` and the other commands take.

        The first argument are the parameters, the others a batch, and the optimizer is `md.optim.adamw(1e-3)`. Raises
        `ShapeError` for a function that returns anything but a scalar.
        """
        name = name or self._arguments.called
        if not self.is_loss:
            shown = ", ".join(" ".join(d.name for d in stored(v)) or "a scalar" for v in self._block.outs)
            raise md.ShapeError(
                f"{name} returns {len(self._block.outs)} arrays ({shown}), and a workload is a loss: one scalar\n"
                "  import the loss; md.compile and .cost() take any imported function"
            )
        labels, examples = (
            [v.label for v in self._block.ins],
            self.split(*self._arguments.filled(self._arguments.arrays)),
        )
        return workload_of(self, name, labels, examples, self._first_count)

    def split(self, *args: Any) -> list[Any]:
        """The arguments as arrays with one axis for each dim, in the order of `specs`; None for a type.

        Raises `ShapeError` for another structure, and for an array of another shape.
        """
        arrays = self._arguments.taken(args)
        return [in_dims(v, arrays) for v in self._block.ins]

    def tensors(self, *args: Any) -> tuple[Any, ...]:
        """Arrays as the tensors of the arguments; a `jax.ShapeDtypeStruct` becomes a spec.

        Raises `ShapeError` for another structure, and for an array of another shape.
        """
        made = zip(self._block.ins, self.split(*args), strict=True)
        return self._arguments.placed(
            {v.places[0]: spec_of(v) if x is None else md.tensor(x, stored(v)) for v, x in made}
        )

    def arrays(self, result: Any, like: Any = None) -> Any:
        """Tensors as arrays in the axes of JAX: those of what the function returns, for a tree such as it returns.

        In another tree, a part that is like an argument, such as a gradient, is a tree of arrays as that argument is,
        and a tensor elsewhere has the axes of the input with the same dims; or else those of the tree `like`, of arrays
        or their types. Raises `ShapeError` if the trees differ.
        """
        tensors, structure = tree.tree_flatten(result, is_leaf=lambda x: isinstance(x, md.Tensor))
        made = self._in_axes([t.array for t in tensors], [t.dims for t in tensors], structure)
        if like is None:
            return made
        leaves, shapes = tree.tree_leaves(made), [np.shape(x) for x in tree.tree_leaves(like) if is_array(x)]
        if len(shapes) != len(leaves):
            raise md.ShapeError(f"there are {len(leaves)} arrays, and like= has {len(shapes)}")
        return tree.tree_unflatten(tree.tree_structure(made), list(map(_merged_as, leaves, shapes)))

    def _in_axes(self, arrays: Sequence[Any], shapes: Sequence[Sequence[md.Dim]], structure: Any) -> Any:
        """A tree of arrays with these dims in the axes of JAX."""
        forms = self._forms()

        def made(i: int, v: Value | None) -> Any:
            return arrays[i] if v is None else in_axes(arrays[i], shapes[i], v)

        def built(node: Any) -> Any:
            own, form = tree.tree_flatten(node)
            asked = [tuple(shapes[i]) for i in own]
            alike = [known for known in forms if form == known.structure and known.has_dims(asked)]
            if alike:
                known = next((known for known in alike if known.dims == asked), alike[0])
                if known.dims != asked and any(known.dims != other.dims for other in alike):
                    raise md.ShapeError(
                        f"the axes of {', '.join(map(str, asked))} may be in the order of several arguments\n"
                        "  bring the dims into the order of one of them with md.transpose"
                    )
                return known.rebuilt([made(i, v) for i, v in zip(own, known.values, strict=True)])
            if type(node) in (tuple, list):
                return type(node)(map(built, node))
            if type(node) is dict:
                return {key: built(each) for key, each in node.items()}
            return tree.tree_map(lambda i: made(i, self._value_of(shapes[i])), node)

        return built(tree.tree_unflatten(structure, range(len(arrays))))

    def _forms(self) -> list[_Form]:
        """The trees that are known: the result, and each argument."""
        forms = [
            _Form(self._out_structure, self._block.outs, functools.partial(tree.tree_unflatten, self._out_structure))
        ]
        rest = iter(self._block.ins)
        for k, spec in enumerate(self.specs):
            values = [next(rest) for _ in tree.tree_leaves(spec)]
            forms.append(_Form(tree.tree_structure(spec), values, functools.partial(self._apart, k, values)))
        return forms

    def _apart(self, argument: int, values: Sequence[Value], arrays: Sequence[Any]) -> Any:
        """Arrays of the tensors of one argument as that argument, with equal layers apart."""
        of_array: dict[int, Any] = {}
        for v, x in zip(values, arrays, strict=True):
            of_array.update(zip(v.places, x if v.is_stacked else [x], strict=True))
        return self._arguments.placed(of_array, argument)

    def _value_of(self, shape: Sequence[md.Dim]) -> Value | None:
        """The input with these dims, in this order if there is one; else a result with them."""
        known = [v for v in (*self._block.ins, *self._block.outs) if set(stored(v)) == set(shape) and not v.is_stacked]
        return next((v for v in known if stored(v) == tuple(shape)), known[0] if known else None)

    def __str__(self) -> str:
        shown = " ".join(f"{name}:{'|'.join(map(str, sizes))}" for name, sizes in self._names.dims.items())
        lines = [f"{self._arguments.called}: {len(self._block.ins)} tensors, dims {shown}"]
        for v in self._block.ins:
            if v.is_stacked:
                lines.append(f"  {v.label} and {v.shape[0] - 1} equal layers are one tensor")
        if self._names.made_up:
            lines.append("dims that nobody named (names={...} or md.named gives them a name):")
            lines += [f"  {name}:{size}  {place}" for name, size, place in self._names.made_up]
        if self.layout:
            lines.append(f"shardings in the code, as a layout: {self.layout}")
        return "\n".join([*lines, *(["notes:"] if self._names.notes else []), *(f"  {n}" for n in self._names.notes)])

    __repr__ = __str__
