"""The way out for a name that the package lacks: the names that other libraries have, and where ours is."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection
from contextlib import suppress
from typing import Any

INSTEAD = {
    **dict.fromkeys(("matmul", "mm", "bmm", "tensordot", "inner", "outer", "vdot", "kron"),
                    "name the dims of the product: md.einsum(x, y, out=dims), or md.dot(x, y, over=dim)"),
    **dict.fromkeys(("add", "subtract", "multiply", "divide", "power", "remainder", "mod", "equal", "less", "greater",
                     "logical_and", "logical_or", "negative", "bitwise_and"), "use the operator, as in x + y or x & y"),
    **dict.fromkeys(("concatenate", "cat", "append", "hstack", "vstack"), "use md.concat(tensors, dim)"),
    **dict.fromkeys(("array", "asarray", "from_numpy", "constant", "as_tensor"), "use md.tensor(array, dims)"),
    **dict.fromkeys(("expand_dims", "unsqueeze", "broadcast_to", "expand"), "use md.broadcast(x, dims)"),
    **dict.fromkeys(("swapaxes", "moveaxis", "permute", "rollaxis"),
                    "dims have names, so their order rarely matters; md.transpose(x, dims) changes it"),
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "empty_like"), "use md.full(x.dims, value, x.dtype)"),
    **dict.fromkeys(("split", "array_split", "chunk"), "use x['dim', start:stop], md.slice or md.unstack"),
    **dict.fromkeys(("flip", "flipud", "fliplr"), "use md.reverse(x, dim)"),
    **dict.fromkeys(("ravel", "view"), "use md.flatten, md.unflatten or md.reshape"),
    **dict.fromkeys(("nonzero", "unique", "argwhere", "extract", "masked_select"),
                    "its result has no size before it runs; use md.where(condition, x, 0), or numbers from x.numpy()"),
    **dict.fromkeys(("jit", "pmap", "pjit", "shard_map", "function"), "use md.compile(f, mesh=, layout=)"),
    **dict.fromkeys(("take_along_axis", "index_select", "index"), "use md.take(x, i, over) or x['dim', i]"),
    **dict.fromkeys(("index_add", "segment_prod"), "use md.put_add or md.scatter_mul"),
    **dict.fromkeys(("float32", "bfloat16", "float16", "int32", "int8", "float64", "int4", "int64", "uint8", "uint32",
                     "bool_", "complex64", "complex128"), "dtypes are text, as in md.cast(x, 'bfloat16')"),
    **dict.fromkeys(("Module", "Linear", "Parameter", "Variable"), "use @md.model, md.param and md.nn"),
    **dict.fromkeys(("no_grad", "detach"), "use md.stop_gradient(x)"),
    **dict.fromkeys(("pow", "float_power"), "use x ** y"),
    **dict.fromkeys(("arctan2",), "use md.atan2"), **dict.fromkeys(("count_nonzero",), "use md.sum(x != 0, over)"),
    **dict.fromkeys(("average",), "use md.sum(x * weights, over) / md.sum(weights, over)"),
    **dict.fromkeys(("device_put", "with_sharding_constraint"), "use md.prefer(x, dims) or a layout"),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "conv_general_dilated"), "use md.conv or md.nn.conv"),
    **dict.fromkeys(("conv_transpose", "ConvTranspose"), "use md.conv(..., base_dilation=stride)"),
    **dict.fromkeys(("psum", "pmean", "pmax", "pmin", "psum_scatter", "all_gather", "all_to_all", "ppermute", "pcast"),
                    "write md.sum(x, dim) and the like for whole arrays; the layout decides what is sent"),
    **dict.fromkeys(("axis_index", "axis_size"), "a model knows dims, not devices: md.iota(dim), x.size(dim)"),
    **dict.fromkeys(("log_sigmoid", "logsigmoid"), "use -md.softplus(-x)"),
    **dict.fromkeys(("expit",), "use md.sigmoid"), **dict.fromkeys(("swish",), "use md.silu"),
    **dict.fromkeys(("relu6",), "use md.clip(x, 0, 6)"),
    **dict.fromkeys(("hard_tanh", "hardtanh"), "use md.clip(x, -1, 1)"),
    **dict.fromkeys(("logcumsumexp",), "use md.cumlogsumexp"), **dict.fromkeys(("topk",), "use md.top_k"),
    **dict.fromkeys(("ragged_dot",), "use md.grouped_dot"),
    **dict.fromkeys(("to", "cpu"), "a layout places values, and md.cast changes their dtype"),
    **dict.fromkeys(("backward", "autograd"), "use md.grad(f) or md.value_and_grad(f)"),
}  # fmt: skip


def detour(name: str, known: Collection[str], modules: Collection[str]) -> str:
    """The public function to use instead of `md.<name>`; `modules` are the public modules that are searched."""
    if name.startswith("arc") and f"a{name[3:]}" in known:
        return f"its name is md.a{name[3:]}"
    if name in INSTEAD:
        return INSTEAD[name]
    package = importlib.import_module(__name__.partition(".")[0])
    for module in modules:
        if name in getattr(package, module).__all__:
            return f"it is md.{module}.{name}"
    if of_jax := _of_jax(name):
        return of_jax
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.7)
    if close:
        return f"did you mean {' or '.join(f'md.{each}' for each in close)}?"
    return "docs/reference.md, or dir(md), lists the names that there are"


def _of_jax(name: str) -> str:
    """The line that applies the function of this name in JAX to tensors; "" if there is none."""
    import jax
    import numpy as np

    for place, title in ((jax.numpy, "jnp"), (jax.nn, "jax.nn"), (jax.scipy.special, "jax.scipy.special")):
        function = getattr(place, name, None)
        if callable(function) and not isinstance(function, type):
            of_numpy = isinstance(getattr(np, name, None), np.ufunc)
            if of_numpy or (place is not jax.numpy and _is_elementwise(function)):  # some of jnp read or write files
                return f"elementwise functions of JAX are called with md.map({title}.{name}, x)"
            return f"call it on blocks: md.local({title}.{name}, x, out=dims, split=dims)"
    return ""


def _is_elementwise(function: Any) -> bool:
    md = importlib.import_module(__name__.partition(".")[0])
    for operands in (1, 2):
        with suppress(md.ShapeError):
            md.eval_shape(lambda *xs: md.map(function, *xs), *[md.spec("a:2 b:3")] * operands)
            return True
    return False
