"""Mistakes with tensors, dims, dtypes and arrays."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md

X = md.tensor([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]], "batch io")
V = md.tensor([1.0, 2.0], "batch")
I = md.tensor([1, 0], "batch")  # noqa: E741
B = md.tensor([True, False], "batch")
KEY = md.random.key(0)
ARRAY = np.ones((2, 3), np.float32)


class Frame:  # what a data frame looks like from here
    values = ARRAY
    shape = (2, 3)


NESTED: object = X
for _ in range(20_000):
    NESTED = [NESTED]

MIXED = {1: X, "a": X}

ROWS = [
    # Trees that JAX cannot follow
    (lambda: md.eval_shape(lambda x: x, MIXED), "a dict in an argument or a result has keys that cannot be sorted"),
    (lambda: md.compile(lambda x: x, "all:1").program(MIXED), "keys that cannot be sorted"),
    (lambda: md.compile(lambda x: {1: x, "a": x}, "all:1").program(X), "keys that cannot be sorted"),
    (lambda: md.grad(lambda x: md.sum(x[1]))(MIXED), "keys that cannot be sorted"),
    # Sizes and elements that no tensor has
    (lambda: md.Dim("a", 10**400), "dim 'a' cannot have a size above 9223372036854775807"),
    (lambda: md.spec(f"a:{2**63}"), "dim 'a' cannot have a size above 9223372036854775807"),
    (lambda: md.Tensor((), object, array=None), "a tensor has numbers or booleans, not elements of dtype object"),
    # Trees too deep for JAX
    (lambda: md.eval_shape(lambda x: x, NESTED), "nested thousands of levels deep"),
    (lambda: md.compile(lambda x: x, "all:1")(NESTED), "nested thousands of levels deep"),
    (lambda: md.compile(lambda x: x, "all:1").program(NESTED), "nested thousands of levels deep"),
    (lambda: md.grad(md.sum)(NESTED), "nested thousands of levels deep"),
    (lambda: md.vmap(md.sum, over="io")(NESTED), "nested thousands of levels deep"),
    (lambda: md.jvp(md.sum, (NESTED,), (NESTED,)), "nested thousands of levels deep"),
    (lambda: md.scan(lambda c, x: (c, x), NESTED, X, over="io"), "nested thousands of levels deep"),
    (lambda: md.Checkpoints("unused").save(1, NESTED), "nested thousands of levels deep"),
    # Making tensors
    (lambda: md.tensor(ARRAY), "0 dims given ([]) for an array of shape (2, 3); name every axis"),
    (lambda: md.tensor(ARRAY, "batch"), "1 dims given (['batch']) for an array of shape (2, 3); name"),
    (lambda: md.tensor(ARRAY, "batch io hidden"), "3 dims given (['batch', 'io', 'hidden']) for an array of shape"),
    (lambda: md.tensor(ARRAY, "batch:3 io:2"), "dims [batch=3 io=2] do not fit an array of shape (2, 3); the"),
    (lambda: md.tensor(ARRAY, "batch batch"), "dims cannot have the dim 'batch' twice (sizes 2 and 3)"),
    (lambda: md.tensor(ARRAY, ("batch", 3)), "a dim is a md.Dim or a name, got 3"),
    (lambda: md.tensor(ARRAY, dims=["batch", None]), "a dim is a md.Dim or a name, got None"),
    (lambda: md.tensor(ARRAY, 2), "dims are text such as 'batch:8 io:4', a md.Dim, or several of"),
    (lambda: md.tensor(ARRAY, "batch, 3"), "a dim is named like a Python variable, got '3'"),
    (lambda: md.tensor("batch io", ARRAY), "expected a tensor, or numbers or booleans; got 'batch io' (str)"),
    (lambda: md.tensor([[1, 2], [3]], "a b"), "the rows of [[1, 2], [3]] have different lengths or types"),
    (lambda: md.tensor([[1, 2], 3], "a b"), "the rows of [[1, 2], 3] have different lengths or types"),
    (lambda: md.tensor(["the", "cat"], "token"), "expected a tensor, or numbers or booleans; got ['the', 'cat']"),
    (lambda: md.tensor(None, "a"), "expected a tensor, or numbers or booleans; got None (NoneType)"),
    (lambda: md.tensor(Frame(), "batch io"), "expected a tensor, or numbers or booleans; got"),
    (lambda: md.tensor({"x": 1.0}, "a"), "expected a tensor, or numbers or booleans; got {'x': 1.0} (dict)"),
    (lambda: md.tensor(iter([1.0, 2.0]), "a"), "expected a tensor, or numbers or booleans; got <list_iterator"),
    (lambda: md.tensor([10**30], "a"), "expected a tensor, or numbers or booleans; got"),
    (
        lambda: md.tensor(np.datetime64("2020-01-01"), "expected a tensor, or numbers or booleans; got"),
        "expected a tensor, or numbers or booleans; got",
    ),
    (lambda: md.tensor(np.ma.masked_array([1.0, 2.0], [True, False]), "a"), "a masked array would lose its mask"),
    (lambda: md.tensor(X, "io batch"), "an array or a number is needed, got tensor(float64[batch=2"),
    (lambda: md.tensor(jax.random.key(0), "a"), "2 dims given (['a', key_word=2]) for an array of shape (2,);"),
    (lambda: md.tensor(jax.ShapeDtypeStruct((2, 3), np.float32), "batch io"), "expected a tensor, or numbers or"),
    (lambda: md.spec("batch:8 io"), "a new dim is written name:size, for example 'batch:512'; got"),
    (lambda: md.spec("batch:8 io:x"), "a new dim is written name:size, for example 'batch:512'; got"),
    (lambda: md.spec("batch=8"), "a dim is written name or name:size, for example 'batch:512';"),
    (lambda: md.spec("batch:-1"), "a new dim is written name:size, for example 'batch:512'; got"),
    (lambda: md.spec("batch:8 batch:4"), "dims cannot have the dim 'batch' twice (sizes 8 and 4)"),
    (lambda: md.spec((8, 4)), "a dim is a md.Dim or a name, got 8"),
    (lambda: md.spec("batch:8", "float33"), "'float33' is no dtype; did you mean 'float32'?"),
    (lambda: md.spec("batch:8", jnp.zeros), "<function zeros"),
    (lambda: md.spec("batch:8", object), "<class 'object'> is no dtype; for example 'float32', 'bfloat16'"),
    (lambda: md.spec("batch:1e3"), "a new dim is written name:size, for example 'batch:512'; got"),
    (lambda: md.Dim("batch", 8.0), "dim 'batch' needs a whole size, got 8.0"),
    (lambda: md.Dim("batch size", 8), "a dim is named like a Python variable, got 'batch size'"),
    (lambda: md.Dim(8, "batch"), "a dim is named like a Python variable, got 8"),
    (lambda: md.Dim("batch", -8), "dim 'batch' cannot have the negative size -8"),
    (lambda: md.Dim("", 8), "a dim is named like a Python variable, got ''"),
    (lambda: md.dims("batch:8 io:4 batch:8"), "dims cannot have the dim 'batch' twice"),
    (lambda: md.dims(("batch", 8)), "a new dim is written name:size, for example 'batch:512'; got"),
    (lambda: md.zeros((2, 3)), "a dim is a md.Dim or a name, got 2"),
    (lambda: md.zeros("batch"), "a new dim is written name:size, for example 'batch:512'; got"),
    (lambda: md.ones("batch:2", "bf16"), "'bf16' is no dtype; did you mean 'bfloat16'?"),
    (lambda: md.full("batch:2", "one"), "expected a tensor, or numbers or booleans; got 'one' (str)"),
    (lambda: md.full("batch:2", [1, 2]), "expected a tensor or a number, got an array of shape (2,)"),
    (lambda: md.arange(10), "dims are text such as 'batch:8 io:4', a md.Dim, or several of"),
    (lambda: md.arange("a"), "a new dim is written name:size, for example 'batch:512'; got 'a'"),
    (lambda: md.linspace("a", 0.0, 1.0), "a new dim is written name:size, for example 'batch:512'; got 'a'"),
    (lambda: md.iota("length"), "a new dim is written name:size, for example 'batch:512'; got"),
    # Reading them
    (lambda: X[0], "a tensor float64[batch=2 io=3] is indexed by name: x['batch', 3]"),
    (lambda: X[:, 1], "a tensor float64[batch=2 io=3] is indexed by name: x['batch', 3]"),
    (lambda: X["batch"], "a tensor float64[batch=2 io=3] is indexed by name: x['batch', 3]"),
    (lambda: list(X), "a tensor float64[batch=2 io=3] has named dims; iterate with"),
    (lambda: float(X), "only a tensor without dims is one number; this is"),
    (lambda: int(V), "only a tensor without dims is one number; this is"),
    (lambda: bool(X > 1), "the truth of a tensor bool[batch=2 io=3] is ambiguous; use"),
    (lambda: 1 if X > 1 else 0, "the truth of a tensor bool[batch=2 io=3] is ambiguous; use"),
    (lambda: X.sum("bach"), "no dim 'bach' here; did you mean 'batch'? there are: batch, io"),
    (lambda: X.mean(0), "dims are text such as 'batch:8 io:4', a md.Dim, or several of"),
    (lambda: X.item(), "only a tensor without dims is one number; this is"),
    (lambda: np.exp(X), "use md.exp, or pass x.numpy() outside a trace"),
    (lambda: np.absolute(X), "use md.abs, or pass x.numpy()"),
    (lambda: np.heaviside(X, 1.0), "use md.map(jnp.heaviside, ...), or pass x.numpy()"),
    (lambda: X["batch", 2], "index 2 is outside batch=2: an index is from -2 to 1"),
    (lambda: X["batch", 0, "batch", 1], "'batch' is indexed twice"),
    (lambda: X["io", X > 0], "x['io', mask] has no size before it runs"),
    (lambda: X.at["io", 0].set(md.ones("time:2")), "has time=2, which the part"),
    (lambda: X.dims["time"], "no dim 'time' here; there are: batch, io"),
    (lambda: md.scatter_set(X, (md.iota("n:2"),), 1.0, "batch io"), "takes an index for each, got 1"),
    (lambda: md.rearrange(X, "batch -> batch"), "names every dim of [batch=2 io=3] once"),
    (lambda: md.rearrange(X, "batch io=(a b) -> batch a b", a=2), "give sizes that divide it, got {'a': 2}"),
    (lambda: md.pad(X, "batch", 2, 0, mode="reflect"), "adds from 0 to 1 elements"),
    (lambda: md.histogram(X, "bin:2", 1, 0), "md.histogram needs low < high"),
    (
        lambda: md.random.choice(md.random.key(0), X, "batch", "draw:3", replace=False),
        "cannot draw draw=3 from batch=2",
    ),
    (lambda: md.linalg.inv(X, "batch", "io"), "two dims of equal size as rows and columns"),
    (lambda: np.add(X, 1.0), "use the operator +, or pass x.numpy() outside a trace"),
    (lambda: np.add([1.0, 2.0], X), "use the operator +, or pass x.numpy() outside a trace"),
    (lambda: np.add.reduce(X), "np.add.reduce takes arrays, and this is float64[batch=2 io=3], whose"),
    (lambda: np.exp(ARRAY, where=X > 1), "np.exp takes arrays, and this is bool[batch=2 io=3]"),
    (lambda: np.negative(X), "use the operator -, or pass"),
    (lambda: operator.iadd(ARRAY.copy(), X), "np.add takes arrays, and this is float64[batch=2 io=3], whose"),
    (lambda: md.grad(lambda x: md.sum(np.exp(x)))(X), "use md.exp, or pass x.numpy() outside a trace"),
    (lambda: md.compile(np.exp, "rows:2").program(X), "use md.exp, or pass x.numpy() outside a trace"),
    (lambda: ARRAY < X, "expected a tensor or a number, got an array of shape (2, 3)"),
    (lambda: jnp.sum(X), "a function of JAX takes arrays, and this is"),
    (lambda: np.asarray(X) @ X, "x @ y does not say which dim is summed"),
    (lambda: setattr(X, "dims", ()), "a tensor does not change: its dims cannot be set"),
    # Arithmetic
    (lambda: X + md.tensor([1.0, 2.0], "hidden"), "broadcasting [batch=2 io=3] with [hidden=2] would be an outer"),
    (lambda: X + md.tensor([1.0, 2.0], "io"), "dim 'io' has two sizes, 3 and 2, in one operation"),
    (lambda: X + ARRAY, "expected a tensor or a number, got an array of shape (2, 3)"),
    (lambda: X @ V, "x @ y does not say which dim is summed"),
    (lambda: X & X, "md.bitwise_and does not take float64; use md.cast(x, 'int32')"),
    (lambda: ~X, "md.invert does not take float64; use md.cast(x, 'int32')"),
    (lambda: -B, "md.negative does not take bool; use md.cast(x, 'float32')"),
    (lambda: md.sqrt("2"), "expected a tensor, or numbers or booleans; got '2' (str)"),
    (lambda: md.exp([1.0]), "expected a tensor or a number, got an array of shape (1,)"),
    (lambda: md.exp(ARRAY), "expected a tensor or a number, got an array of shape (2, 3)"),
    (lambda: md.maximum(X, None), "expected a tensor, or numbers or booleans; got None (NoneType)"),
    (lambda: md.where(X, 1.0, 0.0), "md.where needs a boolean condition, got float64; compare first,"),
    (lambda: md.where(B, X, md.tensor([1.0], "z")), "broadcasting [batch=2] with [batch=2 io=3] with [z=1] would be"),
    (lambda: md.clip(X, "low", 1), "expected a tensor, or numbers or booleans; got 'low' (str)"),
    (lambda: md.cast(X, "float33"), "'float33' is no dtype; did you mean 'float32'?"),
    (lambda: md.cast(X, None), "None is no dtype; for example 'float32', 'bfloat16' or 'int32'"),
    (lambda: md.cast("float32", X), "expected a tensor, or numbers or booleans; got 'float32' (str)"),
    (lambda: md.map(jnp.dot, X, X), "md.map: dot does not take float64[batch=2 io=3],"),
    (lambda: md.map(lambda a: a.sum(), X), "md.map needs an elementwise function; in <lambda>, reduce_sum"),
    (lambda: md.map(np.tanh, X), "md.map takes functions of jax.numpy: jnp.tanh, not np.tanh"),
    (lambda: md.map("tanh", X), "md.map: tanh does not take float64[batch=2 io=3]"),
    # Random numbers
    (lambda: md.random.key("seed"), "expected a tensor, or numbers or booleans; got 'seed' (str)"),
    (lambda: md.random.key(0.5), "the seed of a random key is one integer without dims, got"),
    (lambda: md.random.key(None), "expected a tensor, or numbers or booleans; got None (NoneType)"),
    (lambda: md.random.normal(0, "a:3"), "a random key is a uint32[key_word=2] tensor, got 0"),
    (lambda: md.random.normal("a:3", KEY), "a tensor uint32[key_word=2] has named dims; iterate with"),
    (lambda: md.random.normal(KEY, (3,)), "a dim is a md.Dim or a name, got 3"),
    (lambda: md.random.normal(KEY, "a"), "a new dim is written name:size, for example 'batch:512'; got 'a'"),
    (lambda: md.random.normal(KEY, "a:3", "int32"), "md.random.normal draws floats, not int32"),
    (lambda: md.random.normal(np.random.default_rng(0), "a:3"), "a random key is a uint32[key_word=2] tensor, got"),
    (lambda: md.random.normal(jax.random.key(0, impl="rbg"), "a:3"), "got a JAX random key, key<rbg>; md.random has"),
    (lambda: md.random.bernoulli(KEY, 1.5, "a:3"), "a probability is from 0 to 1, got 1.5"),
    (lambda: md.random.bernoulli(KEY, "a:3"), "expected a tensor, or numbers or booleans; got 'a:3' (str)"),
    (lambda: md.random.randint(KEY, "a:3", 5, 1), "there is no integer from 5 to below 1; give low < high"),
    (lambda: md.random.randint(KEY, "a:3", 0, V), "md.random.randint needs integers; high is float64[batch=2]"),
    (lambda: md.random.randint(KEY, "a:3", B, 2), "md.random.randint needs integers; low is bool[batch=2]"),
    (lambda: md.random.randint(KEY, "a:3", 0.5, 2.5), "low is 0.5 (float); expected int"),
    (lambda: md.random.split(KEY, 0), "md.random.split makes at least 1 key, got n=0"),
    (lambda: md.random.split(KEY, "n"), "a new dim is written name:size, for example 'batch:512'; got 'n'"),
    (lambda: md.random.fold_in(KEY, "step"), "expected a tensor, or numbers or booleans; got 'step' (str)"),
    (lambda: md.random.permutation(KEY, X), "expected one dim, got [batch=2 io=3]"),
    (lambda: md.random.permutation(KEY, X, "bach"), "no dim 'bach' here; did you mean 'batch'? there are: batch, io"),
    (lambda: md.random.truncated_normal(KEY, 1.0, -1.0, "a:3"), "there is no number between 1.0 and -1.0; give low <"),
]
