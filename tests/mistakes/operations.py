"""Mistakes with operations: reductions, products, shapes, indexing, control flow and derivatives."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md

X = md.tensor([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]], "batch io")
V = md.tensor([1.0, 2.0], "batch")
W = md.ones("io:3 hidden:4")
I = md.tensor([1, 0], "batch")  # noqa: E741
IMAGE = md.ones("batch:1 height:8 width:8 in:3")
KERNEL = md.ones("kh:3 kw:3 in:3 out:4")
WINDOW, OUT = {"height": "kh", "width": "kw"}, "batch height width out"
Q, K = md.ones("batch:2 length:4 head:8"), md.ones("batch:2 memory:6 head:8")
PRED = md.tensor(True)


ROWS = [
    # Reductions
    (lambda: md.sum(X, "bach"), "no dim 'bach' here; did you mean 'batch'? there are: batch, io"),
    (lambda: md.sum(X, ["batch", "batch"]), "dims cannot have the dim 'batch' twice"),
    (lambda: md.sum(X, 0), "dims are text such as 'batch:8 io:4', a md.Dim, or several of"),
    (lambda: md.sum(X, over="batch:3"), "dim 'batch' has size 2 here, and size 3 was asked for"),
    (lambda: md.sum([X, X]), "one tensor is needed, got a list of tensors"),
    (lambda: md.argmax(X, "batch io"), "expected one dim, got [batch=2 io=3]"),
    (lambda: md.softmax(X, -1), "dims are text such as 'batch:8 io:4', a md.Dim, or several of"),
    (lambda: md.softmax(I, "batch"), "md.softmax needs floats, got int64[batch=2]; use md.cast(x,"),
    (lambda: md.norm(X, "io", ord="fro"), "md.norm has ord=1, 2 and float('inf'), not 'fro'"),
    (lambda: md.cumsum(X, "oi"), "no dim 'oi' here; there are: batch, io"),
    (lambda: md.cumprod(X, 0), "dims are text such as 'batch:8 io:4', a md.Dim, or several of"),
    (lambda: md.top_k(X, "io", 2), "dims are text such as 'batch:8 io:4', a md.Dim, or several of"),
    (lambda: md.top_k(X, "io", md.Dim("k", 5)), "md.top_k of k=5 out of io=3: there are not that many"),
    (lambda: md.top_k(X, "io", md.Dim("batch", 2)), "a tensor cannot have the dim 'batch' twice"),
    # Products
    (lambda: md.einsum(X, W, out="batch hiden"), "no output dim 'hiden' here; did you mean 'hidden'? there are:"),
    (lambda: md.einsum(X, W, out="batch batch"), "output dims cannot have the dim 'batch' twice"),
    (lambda: md.einsum([X, W], out="batch hidden"), "one tensor is needed, got a list of tensors"),
    (lambda: md.einsum(X, np.ones((3, 4)), out="batch hidden"), "expected a tensor or a number, got an array of"),
    (lambda: md.einsum(X, md.ones("io:4 hidden:2"), out="batch hidden"), "dim 'io' has two sizes, 3 and 4, in one"),
    (lambda: md.dot(X, W, "hidden"), "no dim 'hidden' here; there are: batch, io"),
    (lambda: md.dot(X, W, over=1), "dims are text such as 'batch:8 io:4', a md.Dim, or several of"),
    (lambda: md.callback(X, lambda block: None), "as function(block, part): too many positional arguments"),
    # Shapes
    (lambda: md.reshape(X, "rest:5"), "md.reshape keeps the number of elements: [batch=2 io=3] has 6,"),
    (lambda: md.reshape(X, (3, 2)), "a dim is a md.Dim or a name, got 3"),
    (lambda: md.reshape(X, "rest"), "no dim 'rest' here; there are: batch, io"),
    (
        lambda: md.reshape(X, "io batch"),
        "[io=3 batch=2] are dims of float64[batch=2 io=3] in another order",
    ),
    (lambda: md.reshape(X, "rest:-1"), "a new dim is written name:size, for example 'batch:512'; got"),
    (lambda: md.flatten(X, "batch bach", "n"), "no dim 'bach' here; did you mean 'batch'? there are: batch, io"),
    (lambda: md.flatten(X, "batch io", "n:5"), "md.reshape keeps the number of elements: [batch=2 io=3] has 6,"),
    (lambda: md.unflatten(X, "io", "a:2 b:2"), "md.unflatten keeps the number of elements: io=3 into [a=2 b=2]"),
    (lambda: md.unflatten(X, "io", "a b"), "a new dim is written name:size, for example 'batch:512'; got 'a'"),
    (lambda: md.transpose(X, "io"), "md.transpose names every dim once: [io=3] of [batch=2 io=3]"),
    (lambda: md.transpose(X, (1, 0)), "a dim is a md.Dim or a name, got 1"),
    (lambda: md.rename(X, bach="group"), "no dim 'bach' here; did you mean 'batch'? there are: batch, io"),
    (lambda: md.rename(X, batch="io"), "a renamed tensor cannot have the dim 'io' twice (sizes 2 and 3)"),
    (lambda: md.rename(X, batch="two words"), "one dim is a md.Dim or a name; got 'two words'"),
    (
        lambda: md.rename(X, batch=md.Dim("group", 3)),
        "md.rename cannot change the size of batch=2: use md.slice or md.pad; got group=3",
    ),
    (lambda: md.broadcast(X, "batch io heads"), "no dim 'heads' here; there are: batch, io; to introduce it,"),
    (lambda: md.broadcast(X, "batch:4 io:3"), "dim 'batch' has size 2 here, and size 4 was asked for"),
    (lambda: md.broadcast(X, "io:3"), "md.broadcast to [io=3] would lose [batch=2] of float64[batch=2"),
    (lambda: md.squeeze(X, "io"), "md.squeeze removes dims of size 1, not [io=3]"),
    (lambda: md.concat(X, X), "the truth of a tensor float64[batch=2 io=3] is ambiguous; use"),
    (lambda: md.concat([X, V], "batch"), "md.concat of tensors with different dims: [batch=2 io=3] and"),
    (lambda: md.concat([], "batch"), "md.concat needs at least one tensor"),
    (lambda: md.concat([X, md.ones("batch:2 io:4")], "batch"), "md.concat of tensors with different dims: [batch=2"),
    (lambda: md.concat([X, X], "batch:9"), "md.concat of sizes 2, 2 makes a dim of size 4; got 'batch:9'"),
    (lambda: md.concat([X, X], "hidden"), "no dim 'hidden' here; there are: batch, io"),
    (lambda: md.stack([X, V], "n"), "md.stack of tensors with different dims: [batch=2 io=3] and"),
    (lambda: md.stack([X, X], "io"), "a tensor cannot have the dim 'io' twice (sizes 2 and 3)"),
    (lambda: md.unstack(X, "n"), "no dim 'n' here; there are: batch, io"),
    (lambda: md.slice(X, "io", 2, 5), "md.slice of io=3 from 2, size 5, stride 1 reaches outside; it"),
    (lambda: md.slice(X, "io", 0.5, 1), "start is 0.5 (float); expected int"),
    (lambda: md.slice(X, "io", md.tensor(1), 1), "start is tensor(int64[], 1) (Tensor); expected int"),
    (lambda: md.slice(X, "io", 0, 2, stride=0), "md.slice of io=3 from 0, size 2, stride 0 reaches outside; it"),
    (lambda: md.dynamic_slice(X, "io", md.tensor(1.0), 2), "the start is an integer without dims, got float64[]"),
    (lambda: md.dynamic_slice(X, "io", md.tensor(1), 7), "md.dynamic_slice of 7 elements from io=3"),
    (lambda: md.dynamic_slice(X, "io", V, 2), "the start is an integer without dims, got float64[batch=2]"),
    (lambda: md.dynamic_update_slice(X, W, "io", 0), "an update [io=3 hidden=4] does not fit into [batch=2 io=3]"),
    (lambda: md.pad(X, "io", -5, 0), "md.pad of io=3 by low=-5 high=0 inner=0 leaves a negative size"),
    (lambda: md.roll(X, "io", 1.5), "by is 1.5 (float); expected int"),
    (lambda: md.shift(X, "io", "1"), "by is '1' (str); expected int"),
    (lambda: md.tril(X, "batch", "batch"), "a triangle has two dims, and both are 'batch'"),
    (lambda: md.triu(X, "batch", "hidden"), "no dim 'hidden' here; there are: batch, io"),
    # Indexing
    (lambda: md.take(X, V, "io"), "md.take needs integer indices, got float64; md.cast(i, 'int32')"),
    (lambda: md.take(W, I, "batch"), "no dim 'batch' here; there are: io, hidden"),
    (lambda: md.take(X, [0, 1], "io"), "expected a tensor or a number, got an array of shape (2,)"),
    (
        lambda: md.take(X, 3, "io"),
        "md.take at index 3 of io=3: an index is from 0 to 2, or from -3 to -1",
    ),
    (
        lambda: md.put_add(X, -4, 1.0, "io"),
        "md.put_add at index -4 of io=3: an index is from 0 to 2, or",
    ),
    (lambda: md.one_hot(V, "vocab:3"), "md.one_hot needs integer indices, got float64[batch=2]; use"),
    (lambda: md.one_hot(I, "vocab"), "a new dim is written name:size, for example 'batch:512'; got"),
    (lambda: md.one_hot(I, 3), "dims are text such as 'batch:8 io:4', a md.Dim, or several of"),
    # Windows
    (lambda: md.conv(IMAGE, KERNEL, window=3, out="batch height width out"), "md.conv names the dims it slides over,"),
    (lambda: md.conv(IMAGE, KERNEL, {"height": 3, "width": 3}, OUT), "dims are text such as"),
    (
        lambda: md.conv(IMAGE, KERNEL, {"height": "kh", "width": "kx"}, OUT),
        "no kernel dim 'kx' here;",
    ),
    (
        lambda: md.conv(IMAGE, KERNEL, WINDOW, "batch height width in"),
        "md.conv would lose dim 'out'",
    ),
    (
        lambda: md.conv(IMAGE, KERNEL, WINDOW, OUT, padding="SAMEE"),
        "md.conv pads with 'same',",
    ),
    (
        lambda: md.conv(IMAGE, KERNEL, WINDOW, OUT, stride=0),
        "md.conv takes whole numbers",
    ),
    (lambda: md.max_pool(IMAGE, 2), "md.max_pool names the dims it slides over, for example"),
    (lambda: md.max_pool(IMAGE, {"hight": 2}), "no dim to slide a window over 'hight' here; did you mean"),
    (lambda: md.max_pool(IMAGE, {"height": 2}, padding=1), "md.max_pool pads with 'same', 'valid' or a pair (low,"),
    # Attention
    (lambda: md.attention(Q, K, md.ones("batch:2 memory:5 head:8")), "md.attention: v [batch=2 memory=5 head=8] must"),
    (lambda: md.attention(Q, md.ones("batch:2 memory:6 head:4"), K), "md.attention: 'head' has size 8 in q and 4 in k"),
    (lambda: md.attention(Q, K, K, over="heads"), "no dim of q to sum over 'heads' here; did you mean 'head'?"),
    (lambda: md.attention(Q, K, K, mask=md.ones("length:4 memory:5")), "md.attention: mask is boolean; got float32"),
    (lambda: md.attention(Q, K, K, mask=md.ones("length:4 memory:6")), "md.attention: mask is boolean; got float32"),
    (lambda: md.attention(Q, K, K, method="flash"), "md.attention: method is one of auto, ring, all_to_all, gather,"),
    (lambda: md.attention(Q, K, K, window=0), "md.attention: window is a number of positions of at least 1;"),
    (lambda: md.attention(Q, K, K, causal=True, window=-1), "md.attention: window is a number of positions of at"),
    (lambda: md.attention(Q, K, K, segment_ids=md.ones("batch:2 length:4")), "md.attention: segment_ids is integer"),
    (lambda: md.attention(Q, K, K, block=0), "md.attention: block is a number of positions of at least 1; got"),
    (lambda: md.attention(md.cast(Q, "int32"), K, K), "md.attention takes q, k and v of one floating dtype; got"),
    # Control flow
    (lambda: md.scan(lambda c, x: c + x, 0.0, X, over="batch"), "the function of md.scan returns a pair (carry, y)"),
    (lambda: md.scan(lambda c, x: (c + x, x), 0.0, X, over="batch"), "the carry of md.scan changes"),
    (lambda: md.scan(lambda c, x: (c, x), 0.0, X, over="length"), "no dim 'length' here; there are: batch, io"),
    (lambda: md.scan(0.0, lambda c, x: (c, x), X, over="batch"), "expected a tensor, or numbers or booleans; got"),
    (lambda: md.scan(lambda c, x: (c, x), "start", X, over="batch"), "expected a tensor, or numbers or booleans; got"),
    (lambda: md.associative_scan(lambda a, b: md.sum(a), X, over="batch"), "the function of md.associative_scan"),
    (lambda: md.associative_scan(lambda a, b: a + b, V, over="time"), "no dim 'time' here; there are: batch"),
    (lambda: md.while_loop(lambda i: i + 1, lambda i: i, 0), "the predicate of md.while_loop is one boolean without"),
    (lambda: md.while_loop(lambda v: v < 3, lambda v: v, V), "the predicate of md.while_loop is one boolean without"),
    (lambda: md.while_loop(lambda i: i < 3, lambda i: i * 1.5, 0), "the carry of md.while_loop changes"),
    (lambda: md.while_loop(lambda i: i < 3, lambda i: None, 0), "the carry of md.while_loop changes"),
    (
        lambda: md.while_loop(lambda i: i < 3, lambda i: i + 1, 0, max_trips=10**30),
        "of trips, at most 2,147,483,647; got",
    ),
    (
        lambda: md.scan(lambda c, x: (c, None), 0.0, None, over=md.Dim("trips", 2**31)),
        "md.scan runs at most 2,147,483,647",
    ),
    (lambda: md.while_loop(lambda i: i < 3, lambda i: i + 1, 0, max_trips=-1), "max_trips of md.while_loop is a"),
    (lambda: md.cond(V > 1, lambda: 1.0, lambda: 0.0), "the predicate of md.cond is one boolean without dims, got"),
    (lambda: md.cond(PRED, lambda: 1.0, lambda: V), "the branches of md.cond differ: [float64[]] and"),
    (lambda: md.cond(PRED, lambda: 1.0, lambda: 0.0, frequency=100), "the frequency of md.cond is a fraction of runs"),
    (lambda: md.cond(PRED, lambda: 1.0, lambda: 0.0, frequency=float("nan")), "fraction of runs from 0 to 1, got nan"),
    (lambda: md.switch(1.5, [lambda: 1.0, lambda: 2.0]), "md.switch selects by one integer without dims, got"),
    (lambda: md.switch(0, []), "md.switch needs at least one function"),
    (lambda: md.switch(I, [lambda: 1.0, lambda: 2.0]), "md.switch selects by one integer without dims, got"),
    (lambda: md.checkpoint(lambda x: x, policy="everything")(X), "md.checkpoint has no policy 'everything'"),
    (lambda: md.checkpoint(X), "f is tensor(float64[batch=2 io=3], [[1. 2. 3.] [3. 4. 5.]])"),
    (lambda: md.layers(lambda x: md.sum(x), X, "layer:2"), "md.layers is used outside a model"),
    (lambda: md.layers(lambda x: x, X, "layer"), "md.layers is used outside a model"),
    (lambda: md.accumulate(lambda x: md.sum(x), X, 3), "md.accumulate cannot cut batch=2 into 3 equal parts"),
    (lambda: md.accumulate(lambda x: md.sum(x), X, 0), "md.accumulate cannot cut batch=2 into 0 equal parts"),
    (lambda: md.accumulate(lambda x: md.sum(x), V, 2, over="time"), "no dim 'time' here; there are: batch"),
    (lambda: md.local(lambda a: a[0], X, out="io"), "a tensor float64[batch=2 io=3] is indexed by name: x['batch', 3]"),
    (lambda: md.local(jnp.ravel, X, out="u"), "or, if the function takes arrays of JAX, say so with split="),
    (lambda: md.local(lambda a: a, X, out="batch io", whole="hidden"), "no dim 'hidden' here; there are: batch, io"),
    (lambda: md.print("loss"), "expected a tensor, or numbers or booleans; got 'loss' (str)"),
    (lambda: md.print(X, label=3), "the label of md.print is a text; got 3"),
    # Derivatives
    (lambda: md.grad(lambda x: x * x)(X), "a gradient is taken of one floating tensor without dims; the"),
    (lambda: md.grad(lambda x: md.sum(x))(I), "a gradient with respect to int64[batch=2] was asked for, and"),
    (lambda: md.grad(lambda x: md.sum(x), argnums=1)(X), "argnums (1,) of a call with 1 arguments"),
    (lambda: md.grad(lambda x: 3)(X), "a gradient is taken of one floating tensor without dims; the"),
    (lambda: md.grad(lambda x: float(x.numpy().sum()))(X), "a traced tensor has no values yet, so its values cannot"),
    (lambda: md.grad(md.sum(X)), "f is tensor(float64[], 18.) (Tensor); expected a function"),
    (lambda: md.grad(lambda x: md.sum(x))(), "argnums (0,) of a call with 0 arguments"),
    (lambda: md.value_and_grad(lambda x: (md.sum(x), x))(X), "a gradient is taken of one floating tensor without"),
    (lambda: md.value_and_grad(lambda x: md.sum(x), has_aux=True)(X), "with has_aux=True the function returns a pair"),
    (lambda: md.jvp(lambda x: x, X, X), "a tensor float64[batch=2 io=3] has named dims; iterate with"),
    (lambda: md.jvp(lambda x: x, (X,), (V,)), "a tangent of md.jvp has the type of its value, float64[batch=2"),
    (lambda: md.jvp(lambda x: x, (X,), (X, X)), "a tangent of md.jvp has the structure PyTreeDef((*,)), got"),
    (lambda: md.vjp(lambda x: x, X)[1](V), "a cotangent of md.vjp has the type of its value,"),
    (lambda: md.vjp(X, lambda x: x), "expected a tensor, or numbers or booleans; got <function"),
    (
        lambda: md.grad(md.custom_vjp(lambda x: md.sum(x), lambda x: md.sum(x), lambda r, g: (g,)))(X),
        "fwd of a md.custom_vjp",
    ),
    (lambda: md.vmap(lambda x: x, over="time")(X), "md.vmap over 'time': no argument has that dim"),
    (lambda: md.vmap(lambda x: md.sum(x, "batch"), over="batch")(X), "no dim 'batch' here; there are: io"),
    (lambda: md.vmap(X, over="batch"), "f is tensor(float64[batch=2 io=3], [[1. 2. 3.] [3. 4. 5.]])"),
    (lambda: md.vmap(lambda x: x, over=0)(X), "dims are text such as 'batch:8 io:4', a md.Dim, or several of"),
    # Inside JAX's own transformations
    (lambda: jax.jit(lambda a: md.tensor(a, "a"))(jnp.ones(3)), "a function of JAX takes arrays, and this is"),
    (lambda: jax.grad(lambda a: md.sum(md.tensor(a, "a")))(jnp.ones(3)), "a function of JAX takes arrays, and"),
    (lambda: jax.vmap(lambda a: md.exp(a))(jnp.ones(3)), "a JAX transformation (jit, grad, vmap) is running: got a"),
    (lambda: jax.jit(md.exp)(X), "a function of JAX takes arrays, and this is"),
]
