"""`md.linalg` and `md.fft`: every function under a layout that divides the batch unevenly, beside NumPy and JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md
from meshdsl.dims import names

RNG = np.random.default_rng(0)
A = RNG.normal(size=(5, 3, 3)) + 3 * np.eye(3)
B = RNG.normal(size=(5, 3, 2))
S = A @ A.swapaxes(1, 2)


def functions(a: md.Tensor, b: md.Tensor, s: md.Tensor) -> dict[str, Any]:
    linalg, fft = md.linalg, md.fft
    frequencies = fft.rfft(a, "r")
    return {
        "solve": linalg.solve(a, b, "r", "c"), "triangular": linalg.solve_triangular(a, b, "r", "c"),
        "inv": linalg.inv(a, "r", "c"), "pinv": linalg.pinv(b, "r", "k"), "det": linalg.det(a, "r", "c"),
        "slogdet": linalg.slogdet(a, "r", "c")[1], "cholesky": linalg.cholesky(s, "r", "c"),
        "qr": md.einsum(*linalg.qr(b, "r", "k", "e"), out="n r k"), "svd": linalg.svd(a, "r", "c", "e")[1],
        "eigh": linalg.eigh(s, "r", "c", "e")[0], "power": linalg.matrix_power(a, "r", "c", 3),
        "trace": linalg.trace(a, "r", "c"), "fft": fft.fft(a, "r c"), "ifft": fft.ifft(a, "r"), "rfft": frequencies,
        "irfft": fft.irfft(frequencies, "r", 3), "shift": fft.ifftshift(fft.fftshift(a, "r"), "r"),
        "slope": md.grad(lambda a: md.sum(linalg.det(a, "r", "c")))(a),
        "slope_fft": md.grad(lambda a: md.sum(md.fft.irfft(md.fft.rfft(a, "r"), "r", 3) * a))(a),
    }  # fmt: skip


def test_linear_algebra_and_transforms_equal_numpy_under_an_uneven_layout() -> None:
    compiled = md.compile(functions, mesh="x:2", layout="n:x")
    args = md.tensor(A, "n r c"), md.tensor(B, "n r k"), md.tensor(S, "n r c")
    ours = compiled(*args)
    linalg, fft = np.linalg, np.fft
    theirs = {
        "solve": ("n c k", linalg.solve(A, B)), "triangular": ("n c k", linalg.solve(np.tril(A), B)),
        "inv": ("n c r", linalg.inv(A)), "pinv": ("n k r", linalg.pinv(B)), "det": ("n", linalg.det(A)),
        "slogdet": ("n", linalg.slogdet(A)[1]), "cholesky": ("n r c", linalg.cholesky(S)), "qr": ("n r k", B),
        "svd": ("n e", linalg.svd(A)[1]), "eigh": ("n e", linalg.eigh(S)[0]),
        "power": ("n r c", linalg.matrix_power(A, 3)), "trace": ("n", np.trace(A, axis1=1, axis2=2)),
        "fft": ("n r c", fft.fft2(A)), "ifft": ("n r c", fft.ifft(A, axis=1)), "rfft": ("n r c", fft.rfft(A, axis=1)),
        "irfft": ("n r c", A), "shift": ("n r c", A),
        "slope": ("n r c", jax.grad(lambda a: jnp.linalg.det(a).sum())(A)), "slope_fft": ("n r c", 2 * A),
    }  # fmt: skip
    for name, (dims, wanted) in theirs.items():
        assert set(names(ours[name].dims)) == set(dims.split()), name
        got = md.transpose(ours[name], dims).numpy()
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-9, err_msg=name)
    assert not any(record.bytes for record in compiled.program(*args).collectives), "the batch stays where it is"
