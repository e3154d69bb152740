"""The kernel of an attention: chosen for a platform, printed, and equal to the plain formula."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.cost.ledger import ledger
from meshdsl.ir import walk
from meshdsl.ops.attention import in_numpy
from meshdsl.ops.attention.arrays import Arrays, Span
from meshdsl.ops.attention.kernels import AttentionKernel, Case
from meshdsl.ops.attention.sees import Sees
from meshdsl.ops.attention.spec import AttentionSpec
from meshdsl.targets import target_named, target_of
from meshdsl.targets.cpu import CPU
from meshdsl.targets.gpu import CUDNN
from meshdsl.targets.kernel_choice import choose, is_attention, with_kernels
from meshdsl.targets.tpu import TPU, fused
from tests.ops.test_attention import assert_close, random

NAMES = AttentionSpec("head", "length", "length", "memory")
CASE = Case(1024, 512, 64, 64, np.dtype("bfloat16"), NAMES)
WHOLE = ((0, 256),)
HALVES = (((128, 128), (384, 128)), ((0, 128), (256, 128)))  # in zigzag order: queries of device 1, keys of device 0
ARRAYS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "window": {"window": 90},
    "window_segments": {"causal": True, "window": 100, "segments": True},
    "late": {"causal": True, "offset": 70, "count": 200},
    "early": {"causal": True, "offset": -40},  # the first 40 queries see no key
    "padding": {"count": 200, "segments": True},
    "zigzag": {"causal": True, "spans": HALVES},
    "zigzag_segments": {"causal": True, "spans": HALVES, "segments": True},
    "soft_cap": {"causal": True, "segments": True, "soft_cap": 0.6},
    "in_parts": {"causal": True, "vmem": 1},  # one block of keys at a time
}
QUICK = ("window_segments", "soft_cap", "early", "in_parts")


def arrays(
    seed: int,
    causal: bool = False,
    window: int | None = None,
    segments: bool = False,
    offset: int | None = None,
    count: int | None = None,
    spans: Any = (WHOLE, WHOLE),
    soft_cap: float | None = None,
) -> Arrays:
    """Operands with two batch dims, two group dims and values of another size than keys, in blocks of 128."""
    draw, batch, group = np.random.default_rng(seed), (2, 1), (1, 2)
    queries, keys = (tuple(Span(*span) for span in spans[i]) for i in (0, 1))
    n, m = (sum(span.size for span in x) for x in (queries, keys))
    ids = (draw.integers(0, 2, (*batch, 1, 1, n, 1)), draw.integers(0, 3, (*batch, 1, 1, 1, m)))
    last = max(span.start + span.size for span in keys)
    return Arrays(
        q=draw.normal(size=(*batch, *group, n, 16)),
        k=draw.normal(size=(*batch, m, 16)),
        v=draw.normal(size=(*batch, m, 24)),
        queries=queries,
        keys=keys,
        count=count or last,
        padded=count is not None,
        how=dataclasses.replace(NAMES, scale=0.3, soft_cap=soft_cap, sees=Sees(causal, window)),
        batch=2,
        offset=None if offset is None else np.int32(offset),
        segments=ids if segments else None,
        kernel=AttentionKernel("pallas_interpret", queries=128, keys=128),
    )


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in ARRAYS])
def test_fused_attention_is_the_plain_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels in Pallas' interpreter: result, logarithm, and gradient, with a cotangent of the logarithm."""
    options = dict(ARRAYS[name])
    monkeypatch.setattr(fused, "VMEM", options.pop("vmem", fused.VMEM))
    x = arrays(3, **options)
    with np.errstate(divide="ignore"):
        out, lse = in_numpy.forward(x)
    draw = np.random.default_rng(5)
    ct, lse_ct = draw.normal(size=out.shape), np.where(np.isinf(lse), 0, draw.normal(size=lse.shape))
    given = {"q": x.q, "k": x.k, "v": x.v, "offset": x.offset, "segments": x.segments}
    (made_out, made_lse), (*found, _) = compiled(fused, x, given, out, lse, ct, lse_ct)
    assert_close((made_out, np.nan_to_num(made_lse, neginf=-1)), (out, np.nan_to_num(lse, neginf=-1)))
    *wanted, _ = in_numpy.backward(x, out, lse, ct, lse_ct)
    assert_close(found, wanted)


def compiled(kernel: Any, x: Any, given: dict[str, Any], *saved: Any) -> tuple[Any, Any]:
    """The forward and the backward pass of a kernel on these arrays, as one program."""

    def both(given: dict[str, Any], *saved: Any) -> tuple[Any, Any]:
        on_device = dataclasses.replace(x, **given)
        return kernel.forward(on_device), kernel.backward(on_device, *saved)

    return jax.jit(both)(given, *saved)


LAYOUTS = {
    "ring": ("length:rows", "ring", {"causal": True}),  # in zigzag order
    "ring_soft_cap": ("length:rows", "ring", {"causal": True, "soft_cap": 0.7}),
    "ring_window": ("length:rows", "ring", {"causal": True, "window": 200}),
    "all_to_all": ("length:rows", "all_to_all", {"causal": True}),
    "heads": ("heads:rows", "auto", {}),
    "gather": ("length:rows", "gather", {"window": 150}),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "ring")) for n in LAYOUTS])
def test_fused_attention_under_a_layout_is_that_of_one_device(name: str) -> None:
    layout, method, options = LAYOUTS[name]
    dims = "length:512 heads:2 head:8"
    ins = [random(0, f"{dims} group:2"), random(1, dims), random(2, dims)]

    def loss(*ins: md.Tensor) -> md.Tensor:
        return md.sum(md.square(md.attention(*ins, method=method, **options)))

    mesh = md.Mesh("rows:2").on(jax.devices()[:2])
    step = md.compile(md.value_and_grad(loss, (0, 1, 2)), mesh, layout, attention_kernel="pallas_interpret")
    ran = [x.numpy() for x in jax.tree.leaves(step(*ins))]
    assert_close(ran, md.simulate(step.program(*ins), *ins))
    assert {kernel.name for kernel in kernels(step.program(*ins))} == {"pallas_interpret"}


def kernels(program: md.Program) -> list[AttentionKernel]:
    return [eqn.params["kernel"] for eqn, _ in walk(program) if is_attention(eqn)]


def named(**options: Any) -> AttentionSpec:
    return dataclasses.replace(NAMES, **options)


CHOICES = [
    ({}, "auto", "tpu", "pallas:512x512", ""),
    ({"how": named(block=256)}, "auto", "tpu", "pallas:256x256", ""),
    ({"queries": 3 * 128, "keys": 5 * 128}, "auto", "tpu", "pallas:384x128", ""),
    ({"how": named(extras=("segments", "memory_segments", "offset"))}, "pallas", "tpu", "pallas:512x512", ""),
    ({}, "auto", "gpu", "cudnn", ""),
    ({}, "auto", "cpu", "blockwise", "no fused kernel for cpu"),
    ({}, "auto", "gpu of compute capability 7.0", "blockwise", "no fused kernel for gpu of compute capability 7.0"),
    ({}, "blockwise", "tpu", "blockwise", ""),
    ({"how": named(extras=("bias",))}, "auto", "tpu", "blockwise", "pallas takes no bias="),
    ({"queries": 0}, "auto", "tpu", "blockwise", "pallas takes queries with positions"),
    ({"keys": 1000}, "auto", "tpu", "blockwise", "pallas takes multiples of 128 keys, not 1000"),
    ({"head": 20}, "auto", "tpu", "blockwise", "pallas takes heads of multiples of 16 up to 256, not 20"),
    ({"dtype": np.dtype("float16")}, "auto", "tpu", "blockwise", "pallas takes bfloat16 and float32, not float16"),
    ({"empty": True}, "auto", "tpu", "blockwise", "pallas takes operands with elements"),
    ({"keys": 1000}, "pallas", "tpu", "", "pallas takes multiples of 128 keys, not 1000"),
    ({}, "pallas", "cpu", "", "pallas runs on tpu, not on cpu"),
    ({"part": True}, "auto", "gpu", "blockwise", "cudnn is not used on a part of the keys"),
    ({"how": named(extras=("bias",))}, "auto", "gpu", "blockwise", "cudnn is not used with bias="),
    ({"how": named(soft_cap=1.0)}, "auto", "tpu", "pallas:512x512", ""),
    ({"how": named(soft_cap=1.0)}, "auto", "gpu", "blockwise",
     "cudnn is not used with soft_cap=, which JAX's function does not take"),
    ({"ahead": True}, "auto", "gpu", "blockwise", "cudnn takes a window only with causal=True"),
    ({"apart": True}, "cudnn", "gpu", "", "cudnn takes queries and keys of equal positions, without padding"),
    ({"dtype": np.dtype("float32")}, "auto", "gpu", "blockwise", "cudnn takes bfloat16 and float16, not float32"),
    ({"head": 256}, "auto", "gpu", "blockwise",
     "cudnn takes keys of multiples of 8 up to 128 elements on these devices, and values of at most as many, "
     "not 256 and 64"),
    ({"head": 32}, "cudnn", "gpu", "",
     "cudnn takes keys of multiples of 8 up to 128 elements on these devices, and values of at most as many, "
     "not 32 and 64"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "asked", "platform", "kernel", "reason"), CHOICES)
def test_kernel_is_the_platforms_if_it_takes_the_case(
    changes: dict[str, Any], asked: str, platform: str, kernel: str, reason: str
) -> None:
    found = choose(dataclasses.replace(CASE, **changes), asked, target_named(platform))
    assert (str(found), found.reason) == (kernel, reason)


def attend(**options: Any) -> Any:
    def loss(*ins: md.Tensor) -> md.Tensor:
        return md.sum(md.cast(md.attention(*ins, **options), "float32"))

    return md.grad(loss, (0, 1, 2))


X = md.spec("length:1024 heads:4 head:64", "bfloat16")


@pytest.mark.parametrize("layout", ["length:rows", "heads:rows", "length:rows heads:cols"])
def test_kernels_are_chosen_for_the_target(layout: str) -> None:
    """A program says its kernels; another platform gives others, and the first ones again are the same program."""
    step = md.compile(attend(causal=True, method="ring"), "rows:2 cols:2", layout)
    program = step.program(X, X, X)
    assert {str(kernel) for kernel in kernels(program)} == {"blockwise"}
    assert "kernel=blockwise" in str(program) and "no fused kernel for cpu" in str(program)
    assert with_kernels(program, CPU) is program
    block = 256 if "length" in layout else 512  # half blocks of 512 positions, in zigzag order
    on_tpu = with_kernels(program, TPU)
    assert {str(kernel) for kernel in kernels(on_tpu)} == {f"pallas:{block}x{block}"}
    assert f"kernel=pallas:{block}x{block}" in str(on_tpu)
    machine = md.compile(attend(causal=True, method="ring"), "rows:2 cols:2", layout, machine="tpu-v5e")
    assert kernels(machine.program(X, X, X)) == kernels(on_tpu)


def test_a_kernel_that_cannot_be_is_an_error() -> None:
    odd = md.spec("length:100 heads:4 head:64", "bfloat16")
    asked = md.compile(attend(), "rows:2", "heads:rows", attention_kernel="pallas")
    with pytest.raises(md.LayoutError, match="cannot compute this attention: pallas takes multiples") as error:
        asked.program(odd, odd, odd)
    assert "test_attention.py" in str(error.value)
    with pytest.raises(md.LayoutError, match="pallas runs on tpu, not on cpu"):
        asked(*(md.zeros(X.dims, "bfloat16") for _ in range(3)))
    with pytest.raises(md.LayoutError, match="attention_kernel='splash' is not available; there are: 'auto'"):
        md.compile(attend(), "rows:2", "", attention_kernel="splash")
    with pytest.raises(md.LayoutError, match="has a plan and also attention_kernel"):
        md.compile(attend(), plan=md.Plan("rows:2"), attention_kernel="blockwise")


def test_a_run_takes_the_kernels_of_its_devices() -> None:
    """A program for a TPU runs on CPUs, because only "auto" was asked for."""
    ins = [random(i, "length:256 heads:2 head:16", "float32") for i in range(3)]
    step = md.compile(attend(causal=True), md.Mesh("rows:2").on(jax.devices()[:2]), "heads:rows", machine="tpu-v5e")
    assert {kernel.name for kernel in kernels(step.program(*ins))} == {"pallas"}
    assert_close([x.numpy() for x in jax.tree.leaves(step(*ins))], md.simulate(step.program(*ins), *ins), 1e-5)


def test_a_gpu_without_the_fused_kernel_is_another_platform() -> None:
    class Gpu:
        platform = "gpu"

        def __init__(self, compute_capability: str):
            self.compute_capability = compute_capability

    targets = [target_of([Gpu(c)]) for c in ("7.0", "8.0", "9.0")]
    assert [target.name for target in targets] == ["gpu of compute capability 7.0", "gpu", "gpu"]
    latent = dataclasses.replace(CASE, head=192, value=128)
    assert [choose(latent, "auto", target).fused for target in targets] == [False, False, True]
    machines = [md.machine(name).target for name in ("v100-p3dn", "a100-dgx", "h100", "b200")]
    assert [choose(latent, "auto", target).fused for target in machines] == [False, False, True, True]
    assert target_of(jax.devices()) is CPU


def test_cost_is_that_of_the_kernel_of_the_machine() -> None:
    """Blockwise: whole blocks and scores in memory. Fused: pairs that are seen, at the machine's measured rate."""
    long = md.spec("length:4096 heads:8 head:128", "bfloat16")

    def seconds(machine: str, **options: Any) -> float:
        step = md.compile(attend(causal=True), "rows:2", "heads:rows", **options)
        return step.cost(long, long, long, machine=machine).seconds

    for machine in ("tpu-v5e", "tpu-v5p", "h100"):
        assert 1.5 * seconds(machine) < seconds(machine, attention_kernel="blockwise"), machine
    program = md.compile(attend(causal=True), "rows:2", "heads:rows").program(long, long, long)
    works = [line.attention for line in ledger(program).lines if line.attention]
    assert [work.is_fused(TPU) for work in works] == [True, True] and not works[0].is_fused(CPU)
    seen = 4096 * 4097 / 2
    for line, work in zip([x for x in ledger(program).lines if x.attention], works, strict=True):
        assert work.flops / line.flops == pytest.approx(36 * 512**2 / seen)  # 8 + 7 + ... + 1 pairs of blocks
    assert [round(work.score_bytes / (4 * 36 * 512**2)) for work in works] == [4 * 6, 4 * 8]


def test_values_shorter_than_keys_are_padded_for_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula of JAX's function in XLA instead of cuDNN, which takes keys and values of equal lengths."""
    attention = jax.nn.dot_product_attention

    def in_xla(*ins: Any, implementation: str, **options: Any) -> Any:
        assert implementation == "cudnn" and len({x.shape[-1] for x in ins}) == 1
        return attention(*ins, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", in_xla)
    x = arrays(7, causal=True)
    x = dataclasses.replace(x, v=x.v[..., :12])
    out, lse = in_numpy.forward(x)
    ct = np.random.default_rng(8).normal(size=out.shape)
    forward, (*found, _) = compiled(CUDNN, x, {name: getattr(x, name) for name in "qkv"}, out, lse, ct, None)
    assert_close(forward, (out, lse), 1e-5)
    *wanted, _ = in_numpy.backward(x, out, lse, ct, np.zeros_like(lse))
    assert_close(found, wanted, 1e-5)


def test_cudnn_attention_lowers_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward custom calls in StableHLO. Nothing runs without a GPU; JAX's version checks are off."""
    cudnn: Any = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")  # fails if JAX moves it
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: None)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda capability: False)
    q = md.spec("batch:2 length:256 heads:4 group:2 head:64", "bfloat16")
    k = md.spec("batch:2 length:256 heads:4 head:64", "bfloat16")
    for layout, options in (("heads:rows", {"causal": True}), ("length:rows", {"causal": True, "window": 100})):
        step = md.compile(attend(method="all_to_all", **options), "rows:2", layout, attention_kernel="cudnn")
        program = step.program(q, k, k)
        assert {str(kernel) for kernel in kernels(program)} == {"cudnn"}
        (stages,) = step._stages.values()
        function = stages.jit(stages.bound, stages.shardings, target_named("gpu"))
        shapes = [jax.ShapeDtypeStruct(program.stored_shape(v), v.dtype) for v in program.ins]
        text = function.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("@__cudnn$fmhaSoftmaxBackward(") == 1 and text.count("@__cudnn$fmhaSoftmax(") >= 1
