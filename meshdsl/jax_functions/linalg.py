"""Linear algebra of matrices whose rows and columns are named dims: `jax.numpy.linalg` on each device's blocks.

A tensor has a matrix for each place of its other dims, which may be sharded, also unevenly; the rows and columns are
gathered. JAX differentiates the functions. `rows` and `columns` are dims of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular as _solve_triangular

from ..dims import Dim, DimLike, find, names
from ..errors import ShapeError
from ..ops.creation import ones
from ..ops.elementwise import where
from ..ops.indexing import iota, new_dim
from ..ops.reductions import broadcast, sum
from ..ops.reshape import transpose
from ..trace import Tensor, as_tensor
from .local import local

__all__ = [
    "cholesky", "det", "diagonal", "eigh", "eye", "inv", "matrix_power", "pinv", "qr", "slogdet", "solve",
    "solve_triangular", "svd", "trace",
]  # fmt: skip


def _matrices(name: str, x: Any, rows: DimLike, columns: DimLike, square: bool = True) -> tuple[Tensor, Dim, Dim, str]:
    """The tensor with its rows and columns last, these dims, and the names of the others."""
    x = as_tensor(x)
    row, column = find(rows, x.dims), find(columns, x.dims)
    if row == column or (square and row.size != column.size):
        what = "two dims of equal size" if square else "two dims"
        raise ShapeError(f"a matrix of md.linalg.{name} has {what} as rows and columns, got {row!r} and {column!r}")
    batch = [d for d in x.dims if d not in (row, column)]
    return transpose(x, (*batch, row, column)), row, column, " ".join(names(batch))


def _mapped(f: Callable[..., Any], out: Any, batch: str, *xs: Tensor) -> Any:
    return local(f, *xs, out=out, split=batch)


def inv(x: Any, rows: DimLike, columns: DimLike) -> Tensor:
    """The inverse of square matrices; its rows are the columns of x.

    >>> import meshdsl as md
    >>> md.linalg.inv(md.tensor([[2.0, 0.0], [0.0, 4.0]], "a b"), "a", "b")
    tensor(float32[b=2 a=2], [[0.5  0.  ]
     [0.   0.25]])

    Raises `ShapeError` for dims that x lacks or whose sizes differ.
    """
    x, row, column, batch = _matrices("inv", x, rows, columns)
    return _mapped(jnp.linalg.inv, f"{batch} {column.name} {row.name}", batch, x)


def pinv(x: Any, rows: DimLike, columns: DimLike) -> Tensor:
    """The pseudo-inverse of matrices; its rows are the columns of x.

    >>> import meshdsl as md
    >>> md.linalg.pinv(md.tensor([[2.0], [0.0]], "a b"), "a", "b").numpy().round(3)
    array([[0.5, 0. ]], dtype=float32)

    Raises `ShapeError` for dims that x lacks.
    """
    x, row, column, batch = _matrices("pinv", x, rows, columns, square=False)
    return _mapped(jnp.linalg.pinv, f"{batch} {column.name} {row.name}", batch, x)


def det(x: Any, rows: DimLike, columns: DimLike) -> Tensor:
    """The determinant of square matrices.

    >>> import meshdsl as md
    >>> md.linalg.det(md.tensor([[2.0, 0.0], [0.0, 4.0]], "a b"), "a", "b")
    tensor(float32[], 8.)

    Raises `ShapeError` for dims that x lacks or whose sizes differ.
    """
    x, _, _, batch = _matrices("det", x, rows, columns)
    return _mapped(jnp.linalg.det, batch, batch, x)


def slogdet(x: Any, rows: DimLike, columns: DimLike) -> tuple[Tensor, Tensor]:
    """The sign and the logarithm of the absolute value of the determinant of square matrices.

    >>> import meshdsl as md
    >>> md.linalg.slogdet(md.tensor([[1.0, 0.0], [0.0, -1.0]], "a b"), "a", "b")
    (tensor(float32[], -1.), tensor(float32[], 0.))

    Raises `ShapeError` for dims that x lacks or whose sizes differ.
    """
    x, _, _, batch = _matrices("slogdet", x, rows, columns)
    sign, value = _mapped(lambda a: tuple(jnp.linalg.slogdet(a)), [batch, batch], batch, x)
    return sign, value


def cholesky(x: Any, rows: DimLike, columns: DimLike) -> Tensor:
    """The lower triangle L of positive definite matrices x = L Lᵀ; L has the dims of x.

    >>> import meshdsl as md
    >>> md.linalg.cholesky(md.tensor([[4.0, 2.0], [2.0, 5.0]], "a b"), "a", "b")
    tensor(float32[a=2 b=2], [[2. 0.]
     [1. 2.]])

    Raises `ShapeError` for dims that x lacks or whose sizes differ.
    """
    x, row, column, batch = _matrices("cholesky", x, rows, columns)
    return _mapped(jnp.linalg.cholesky, f"{batch} {row.name} {column.name}", batch, x)


def qr(x: Any, rows: DimLike, columns: DimLike, rank: str) -> tuple[Tensor, Tensor]:
    """Orthonormal columns Q [rows, rank] and an upper triangle R [rank, columns] with x = Q R.

    >>> import meshdsl as md
    >>> q, r = md.linalg.qr(md.tensor([[3.0], [4.0]], "a b"), "a", "b", "k")
    >>> q.dims, md.abs(r)
    ((a=2, k=1), tensor(float32[k=1 b=1], [[5.]]))

    `rank` names the new dim, as long as the shorter of the two. Raises `ShapeError` for dims that x lacks.
    """
    x, row, column, batch = _matrices("qr", x, rows, columns, square=False)
    out = [f"{batch} {row.name} {rank}", f"{batch} {rank} {column.name}"]
    q, r = _mapped(lambda a: tuple(jnp.linalg.qr(a)), out, batch, x)
    return q, r


def svd(x: Any, rows: DimLike, columns: DimLike, rank: str) -> tuple[Tensor, Tensor, Tensor]:
    """U [rows, rank], the singular values [rank] in descending order, and Vᵀ [rank, columns].

    >>> import meshdsl as md
    >>> u, s, v = md.linalg.svd(md.tensor([[3.0, 0.0], [0.0, 4.0]], "a b"), "a", "b", "k")
    >>> s
    tensor(float32[k=2], [4. 3.])

    `rank` names the new dim, as long as the shorter of the two. Raises `ShapeError` for dims that x lacks.
    """
    x, row, column, batch = _matrices("svd", x, rows, columns, square=False)
    out = [f"{batch} {row.name} {rank}", f"{batch} {rank}", f"{batch} {rank} {column.name}"]
    u, s, v = _mapped(lambda a: tuple(jnp.linalg.svd(a, full_matrices=False)), out, batch, x)
    return u, s, v


def eigh(x: Any, rows: DimLike, columns: DimLike, rank: str) -> tuple[Tensor, Tensor]:
    """The eigenvalues [rank] of symmetric matrices, in ascending order, and the eigenvectors [rows, rank].

    >>> import meshdsl as md
    >>> md.linalg.eigh(md.tensor([[2.0, 1.0], [1.0, 2.0]], "a b"), "a", "b", "k")[0].numpy().round(3)
    array([1., 3.], dtype=float32)

    `rank` names the new dim. Raises `ShapeError` for dims that x lacks or whose sizes differ.
    """
    x, row, _, batch = _matrices("eigh", x, rows, columns)
    values, vectors = _mapped(
        lambda a: tuple(jnp.linalg.eigh(a)), [f"{batch} {rank}", f"{batch} {row.name} {rank}"], batch, x
    )
    return values, vectors


def _solved(name: str, f: Callable[..., Any], a: Any, b: Any, rows: DimLike, columns: DimLike) -> Tensor:
    a, row, column, batch = _matrices(name, a, rows, columns)
    b = as_tensor(b)
    find(row, b.dims)
    shared = [d for d in a.dims if d not in (row, column)]
    missing = [d for d in shared if d not in b.dims]
    b = broadcast(b, (*missing, *b.dims)) if missing else b
    more = [d for d in b.dims if d not in (row, *shared)]
    if column in more:
        raise ShapeError(
            f"the right side of md.linalg.{name} has the columns {column!r}; md.rename them in one of both"
        )
    b = transpose(b, (*shared, row, *more))

    def solve(a: Any, b: Any) -> Any:
        flat = b.reshape((*a.shape[:-1], -1))
        return f(a, flat).reshape(b.shape)

    return _mapped(solve, f"{batch} {column.name} {' '.join(names(more))}", batch, a, b)


def solve(a: Any, b: Any, rows: DimLike, columns: DimLike) -> Tensor:
    """The x [columns, ...] with a x = b, for square matrices a [rows, columns] and b [rows, ...].

    >>> import meshdsl as md
    >>> a, b = md.tensor([[2.0, 0.0], [0.0, 4.0]], "a b"), md.tensor([2.0, 2.0], "a")
    >>> md.linalg.solve(a, b, "a", "b")
    tensor(float32[b=2], [1.  0.5])

    Dims of b that a has are paired; others are further right sides. Raises `ShapeError` for dims that a or b lacks.
    """
    return _solved("solve", jnp.linalg.solve, a, b, rows, columns)


def solve_triangular(a: Any, b: Any, rows: DimLike, columns: DimLike, lower: bool = True) -> Tensor:
    """The x with a x = b, as `md.linalg.solve`, of triangular matrices; the other triangle is not read.

    >>> import meshdsl as md
    >>> a, b = md.tensor([[2.0, 9.0], [0.0, 4.0]], "a b"), md.tensor([2.0, 2.0], "a")
    >>> md.linalg.solve_triangular(a, b, "a", "b")
    tensor(float32[b=2], [1.  0.5])

    Upper triangles with `lower=False`. Raises `ShapeError` for dims that a or b lacks.
    """
    return _solved("solve_triangular", lambda a, b: _solve_triangular(a, b, lower=lower), a, b, rows, columns)


def matrix_power(x: Any, rows: DimLike, columns: DimLike, n: int) -> Tensor:
    """The n-th power of square matrices, with the dims of x; of the inverse for a negative n.

    >>> import meshdsl as md
    >>> md.linalg.matrix_power(md.tensor([[1.0, 1.0], [0.0, 1.0]], "a b"), "a", "b", 3)
    tensor(float32[a=2 b=2], [[1. 3.]
     [0. 1.]])

    Raises `ShapeError` for dims that x lacks or whose sizes differ.
    """
    x, row, column, batch = _matrices("matrix_power", x, rows, columns)
    return _mapped(lambda a: jnp.linalg.matrix_power(a, n), f"{batch} {row.name} {column.name}", batch, x)


def eye(rows: DimLike, columns: DimLike, dtype: Any = "float32") -> Tensor:
    """The identity: 1 where the row equals the column, else 0. The dims are new.

    >>> import meshdsl as md
    >>> md.linalg.eye("a:2", "b:2")
    tensor(float32[a=2 b=2], [[1. 0.]
     [0. 1.]])

    `dtype` is that of the result. Raises `ShapeError` for a dim without a size.
    """
    x = ones([new_dim(rows), new_dim(columns)], dtype)
    return where(broadcast(iota(x.dims[0]), x.dims) == iota(x.dims[1]), x, 0)


def diagonal(x: Any, rows: DimLike, columns: DimLike) -> Tensor:
    """The elements whose row equals their column, along the rows.

    >>> import meshdsl as md
    >>> md.linalg.diagonal(md.tensor([[1.0, 2.0], [3.0, 4.0]], "a b"), "a", "b")
    tensor(float32[a=2], [1. 4.])

    Raises `ShapeError` for dims that x lacks or whose sizes differ.
    """
    x, row, column, _ = _matrices("diagonal", x, rows, columns)
    return sum(x, column, where=broadcast(iota(row), (row, column)) == iota(column))


def trace(x: Any, rows: DimLike, columns: DimLike) -> Tensor:
    """The sum of the diagonal of square matrices.

    >>> import meshdsl as md
    >>> md.linalg.trace(md.tensor([[1.0, 2.0], [3.0, 4.0]], "a b"), "a", "b")
    tensor(float32[], 5.)

    Raises `ShapeError` for dims that x lacks or whose sizes differ.
    """
    diagonals = diagonal(x, rows, columns)
    return sum(diagonals, find(rows, diagonals.dims))
