"""Losses and metrics of parts of the data are those of all of it: micro-batches, devices, evaluation batches.

Every layout averages alike, so the references are NumPy's and JAX's, in float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl import train
from meshdsl.models import causal, deepseek, gpt_moe, mixtral, moe_transformer, ncf, resnet, seq2seq, transformer
from meshdsl.models import translation as translations

Values = dict[str, Any]


@dataclass(frozen=True)
class Config:
    batch: int = 12


@md.model
def net(batch: Values) -> md.Tensor:
    return batch["value"] * md.param("w", (), init=md.init.ones())


def inputs(config: Config) -> Values:
    batch = md.Dim("batch", config.batch)
    return {"value": md.spec([batch]), "mask": md.spec([batch], "int32")}


def workload(loss: Callable[..., Any], rate: float = 0.5, **more: Any) -> md.Workload:
    return md.Workload(
        "masked", Config(), model=lambda c: net, inputs=inputs, loss=lambda c: loss,
        optimizer=lambda c: md.optim.sgd(rate), **more,
    )  # fmt: skip


def joined(params: Values, batch: Values, key: Any = None) -> Any:
    y, real = net(params, batch), batch["mask"] != 0
    squared = train.mean(md.square(y), real)
    return squared + 0.5 * train.mean(md.abs(y), count=y.size / 2) - 0.1 * train.same(md.square(params["w"])) + 1, {
        "perplexity": train.mean(md.square(y), real, then=md.exp),
        "weighted": train.mean(y * batch["value"], md.abs(batch["value"])),
        "largest": train.maximum(y),
        "least": train.minimum(y),
        "norm": train.norm(y),
        "total": train.total(real),
        "share": train.mean(y > 0, real),
        "ratio": train.combine(lambda hits, real: hits / real, train.total(y > 0), train.total(real)),
        "w": train.same(params["w"]),
    }


def reference(w: Any, value: Any, mask: Any) -> tuple[Any, Values]:
    y, real = value.astype("float64") * w, mask != 0
    count = jnp.maximum(real.sum(), 1)
    squared = (jnp.square(y) * real).sum() / count
    return squared + 0.5 * jnp.abs(y).sum() / (value.size / 2) - 0.1 * w**2 + 1, {
        "perplexity": jnp.exp(squared),
        "weighted": (y * value).sum() / jnp.abs(value).sum(),
        "largest": y.max(),
        "least": y.min(),
        "norm": jnp.sqrt(jnp.square(y).sum()),
        "total": real.sum(),
        "share": ((y > 0) & real).sum() / count,
        "ratio": (y > 0).sum() / jnp.maximum(real.sum(), 1e-30),
        "w": w,
    }


BY_JAX = jax.jit(jax.value_and_grad(reference, has_aux=True))


@cache
def guarded_step(parts: int, mesh: str, layout: str) -> tuple[md.Workload, md.Compiled]:
    of = workload(joined)
    return of, md.compile(of.train_step(guard=True), plan=md.Plan(mesh, layout, microbatches=parts))


def data(seed: int, real: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal(12).astype("float32"), (rng.random(12) < real).astype("int32")


@pytest.mark.parametrize("parts", [1, 2, 3, 12])
@pytest.mark.parametrize(("mesh", "layout"), [("c:1", ""), ("c:4", "batch:c")])
@pytest.mark.parametrize("real", [0.2, 0.6])
def test_metric_of_microbatches_is_that_of_the_batch(parts: int, mesh: str, layout: str, real: float):
    value, mask = data(parts, real)
    batch = {"value": md.tensor(value, "batch"), "mask": md.tensor(mask, "batch")}
    of, step = guarded_step(parts, mesh, layout)
    after, _, metrics = step(*of.init(md.random.key(0)), batch)
    (loss, wanted), slope = BY_JAX(1.0, value, mask)
    assert after["w"].item() == pytest.approx(1 - 0.5 * float(slope), rel=1e-5)
    for name, x in {"loss": loss, **wanted, "non_finite": 0}.items():
        assert metrics[name].item() == pytest.approx(float(x), rel=1e-5, abs=1e-6), name


def test_metric_of_devices_and_batches_sends_each_sum_once():
    """Only the loss's count is complete before the loop; a plain mean sends what it sent before."""

    def plain(params: Values, batch: Values) -> Any:
        return train.mean(md.square(net(params, batch)))

    def masked(params: Values, batch: Values) -> Any:
        return train.mean(md.square(net(params, batch)), batch["mask"] != 0)

    for loss, sent in ((plain, 1), (masked, 2)):  # loss and gradient are two numbers, sent together
        of = workload(loss)
        program = md.compile(of.train_step(), "c:4", "batch:c", microbatches=3).program(*of.specs())
        assert [record.count for record in program.collectives] == [1] * sent, str(program)


BATCHES = [data(seed, real) for seed, real in ((1, 0.2), (2, 0.8), (3, 0.5))]


def as_batch(split: str, step: int) -> Values:
    value, mask = BATCHES[step % 3]
    return {"value": value, "mask": mask}


def evaluation(of: md.Workload, **options: Any) -> Values:
    plan = md.Plan("c:2", "batch:c", **options)
    return next(r for r in train.train(of, plan, steps=1, batches=as_batch, eval_batches=3) if r["event"] == "eval")


def test_evaluation_divides_once():
    record = evaluation(workload(joined, 0.0), microbatches=2)
    value, mask = (np.concatenate(x) for x in zip(*BATCHES, strict=True))
    (loss, wanted), _ = BY_JAX(1.0, value, mask)
    for name, x in {"loss": loss, **wanted}.items():
        assert record[name] == pytest.approx(float(x), rel=1e-5), name
    assert "averaged" not in record


def ratio(params: Values, batch: Values) -> Any:
    return md.sum(net(params, batch) * batch["mask"]) / md.sum(batch["mask"])


def plain_mean(params: Values, batch: Values) -> Any:
    return md.mean(md.square(net(params, batch)))


def test_evaluation_error_for_a_mean_of_means():
    with pytest.raises(md.MeshdslError, match=r"'loss' of masked is a plain scalar, and its mean over evaluation"):
        evaluation(workload(ratio))
    record = evaluation(workload(plain_mean, 0.0))
    assert record["loss"] == pytest.approx(np.mean([np.square(v) for v, _ in BATCHES]), rel=1e-5)
    assert "averaged" not in record
    unknown = workload(plain_mean, mean_over=lambda c: None)
    assert evaluation(unknown)["averaged"] == ["loss"]


def normalised(params: Values, batch: Values) -> Any:
    y = net(params, batch)
    return train.mean(md.square(y - md.mean(y)) * 4)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (ratio, "return its sum and its count"),
        (lambda p, b: (plain_mean(p, b), {"largest": md.max(net(p, b))}), "'largest' of masked is"),
        (lambda p, b: md.sum(net(p, b)), "'loss' of masked is"),
        (normalised, "its terms depend on other elements of the batch"),
    ],
)
def test_train_error_for_a_false_claim_about_microbatches(loss: Callable[..., Any], says: str):
    of = workload(loss, mean_over=lambda c: "batch")
    with pytest.raises(md.MeshdslError, match=says):
        list(train.train(of, md.Plan("c:2", "batch:c", microbatches=2), steps=1, batches=as_batch, eval_batches=0))


def test_train_takes_a_true_claim_about_microbatches():
    of = workload(plain_mean, mean_over=lambda c: "batch")
    records = list(train.train(of, md.Plan("c:2", "batch:c", microbatches=4), steps=2, batches=as_batch))
    assert [r["event"] for r in records] == ["start", "step", "step", "eval", "end"]


REFUSED: list[tuple[Callable[..., Any], str]] = [
    (ratio, "'loss' is a plain scalar"),
    (lambda p, b: (joined(p, b)[0], {"hits": md.mean(net(p, b))}), "'hits' is a plain scalar"),
    (lambda p, b: train.maximum(net(p, b)), "the loss is a maximum, so micro-batches"),
    (lambda p, b: train.mean(net(p, b), then=md.exp), "the loss is a function of sums, so micro-batches"),
    (lambda p, b: (joined(p, b)[0], {}, {"w": md.sum(net(p, b))}), "the loss returns 'w'"),
]


@pytest.mark.parametrize(("loss", "says"), REFUSED, ids=range(len(REFUSED)))
def test_microbatches_error_for_what_does_not_add_up(loss: Callable[..., Any], says: str):
    of = workload(loss)
    with pytest.raises(md.ShapeError, match=says):
        md.compile(of.train_step(), "c:1", "", microbatches=2).program(*of.specs())
    md.compile(of.train_step(), "c:1", "").program(*of.specs())


SIZES: Any = {"layers": 2, "d_model": 8, "heads": 2, "d_head": 4, "d_ff": 8, "vocab": 16, "length": 4, "batch": 8}
EXPERTS: Any = {"layers": 4, "experts": 2, "expert_hidden": 8, "optimizer": "momentum"}
MODELS = {
    "lm": transformer.lm.replace(**SIZES),
    "mixtral": mixtral.mixtral.replace(**SIZES, capacity_factor=1.0),
    "deepseek": deepseek.deepseek.replace(
        **{**SIZES, "layers": 3}, experts=4, groups=2, best_groups=1, capacity_factor=1.0, d_rotary=4, d_value=4,
        d_expert=8, query_latent=8, latent=8,
    ),
    "gpt_moe": gpt_moe.gpt_moe.replace(**{**SIZES, **EXPERTS}, sequences=2),
    "moe": moe_transformer.moe.replace(**{**SIZES, **EXPERTS}, source=4, sequences=2),
    "translation": translations.translation.replace(**{**SIZES, **EXPERTS, "vocab": 300}, source=4, sequences=1),
    "seq2seq": seq2seq.seq2seq.replace(**SIZES, source=4),
    "digits": resnet.digits.replace(batch=8, norm="group"),
    "ncf": ncf.ncf.replace(batch=8, negatives=10),
}  # fmt: skip
PADDED = {"moe", "translation", "seq2seq"}


def random_batch(of: md.Workload, name: str) -> Values:
    """Inputs whose rows have different numbers of targets."""
    rng, ignored, batch = np.random.default_rng(1), 0 if name in PADDED else -100, {}
    for path, spec in of.inputs(of.config).items():
        size = [d.size for d in spec.dims]
        x = rng.integers(1, 9, size) if spec.dtype.kind == "i" else rng.standard_normal(size)
        if path in ("targets", "target"):
            x[1], x.reshape(len(x), -1)[5:, -1] = ignored, ignored
        batch[path] = md.tensor(x.astype(spec.dtype), spec.dims)
    return batch


LONG = ("deepseek", "mixtral", "moe", "translation")  # seconds each; other models have the same losses


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in MODELS]
)
def test_bundled_losses_of_microbatches_are_those_of_the_batch(name: str):
    of = dataclasses.replace(MODELS[name], optimizer=lambda c: md.optim.sgd(0.1))
    args = (*of.init(md.random.key(0)), random_batch(of, name))
    plans = [md.Plan("rows:1", ""), md.Plan("rows:2", "batch:rows group:rows", microbatches=2)]
    stages = md.Plan("stages:2", "layer:stages", microbatches=2)
    plans += [stages] if name in ("lm", "mixtral", "deepseek", "moe", "gpt_moe", "seq2seq") else []
    rules = {d.name for tree in of.specs() for spec in jax.tree.leaves(tree) for d in spec.dims}
    kept = [p.replace(layout="batch:rows") if "group" not in rules and "rows" in str(p.layout) else p for p in plans]
    programs = [md.compile(of.train_step(), plan=plan).program(*args) for plan in kept]
    whole, *others = (md.simulate(program, *jax.tree.leaves(args)) for program in programs)
    for found in others:
        for a, b in zip(found, whole, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)


def test_bundled_losses_do_not_count_ignored_targets():
    logits, targets = np.random.default_rng(0).standard_normal((3, 4, 5)).astype("float32"), np.full((3, 4), -100)
    targets[0, 1], targets[2] = 3, 2
    names, at = "batch length vocab", md.tensor(targets.astype("int32"), "batch length")
    logits_of = md.model(lambda batch: md.tensor(logits, names))
    found = causal.loss(logits_of)({}, {"targets": at})
    each = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), np.maximum(targets, 0)[..., None], -1)[..., 0]
    assert found.item() == pytest.approx(each[targets >= 0].mean(), rel=1e-6)
