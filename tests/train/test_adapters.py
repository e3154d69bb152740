"""Grain and Hugging Face datasets as training data: a resumed run reads the batches that it would have read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import grain
import numpy as np
import pytest

import meshdsl as md
from meshdsl.train import Iterated, Keeping, from_datasets, from_grain, train
from meshdsl.train.batches import described
from meshdsl.train.iterators import go_to, position_of
from tests.train.tiny import tiny

datasets.disable_progress_bars()
ROWS = 11  # a batch of 4 crosses epochs
EPOCHS = 4  # Grain reads 500 batches ahead if there are as many


def values(n: int) -> list[float]:
    return [float(n), n / 2, -float(n)]


def as_array(row: Any) -> dict[str, np.ndarray]:
    return {"x": np.asarray(row["x"], np.float32)}


def file(folder: Path) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"x": values(n), "id": n}) for n in range(ROWS)))
    return str(path)


def mapped(folder: Path) -> Any:
    rows = grain.MapDataset.source([{"x": values(n)} for n in range(ROWS)]).seed(3)
    return from_grain(rows.shuffle().repeat(EPOCHS).map(as_array).batch(4), rows.map(as_array).batch(4))


def loader(folder: Path) -> Any:
    sampler = grain.samplers.IndexSampler(
        num_records=ROWS, shuffle=True, seed=3, num_epochs=EPOCHS, shard_options=grain.sharding.NoSharding()
    )

    class Read(grain.transforms.Map):
        def map(self, element: Any) -> Any:
            return as_array({"x": values(int(element))})

    source: Any = np.arange(ROWS)  # it has __len__ and __getitem__
    batches = grain.DataLoader(
        data_source=source, sampler=sampler, operations=[Read(), grain.transforms.Batch(4)], worker_count=0
    )
    return from_grain(batches)


def table(folder: Path) -> Any:
    rows = datasets.load_dataset("json", data_files=file(folder), split="train", cache_dir=str(folder / "cache"))
    return from_datasets(rows, rows, batch=4, seed=3, columns=["x"])


def streamed(folder: Path) -> Any:
    rows = datasets.load_dataset(
        "json", data_files=file(folder), split="train", cache_dir=str(folder / "cache"), streaming=True
    )
    return from_datasets(rows, rows, batch=4, columns=["x"])


SOURCES = [mapped, loader, table, streamed]


@pytest.mark.parametrize("make", SOURCES)
def test_data_resumes_exactly(tmp_path: Path, make: Callable[[Path], Any]):
    data = make(tmp_path)
    position, batches = position_of(data), [data("train", step)["x"].tolist() for step in range(1, 9)]
    for step in range(0, 8, 3):  # 32 of 11 rows: almost three epochs
        resumed = make(tmp_path)
        assert described(resumed) == described(data)
        if position is not None:
            go_to(resumed, json.loads(json.dumps(position)), "step 0")
        read = [resumed("train", n)["x"].tolist() for n in range(1, step + 1)] if position is not None else []
        position_there = json.loads(json.dumps(position_of(resumed)))
        again = make(tmp_path)
        if position is not None:
            go_to(again, position_there, f"step {step}")
        rest = [again("train", n)["x"].tolist() for n in range(step + 1, 9)]
        assert [*read, *rest][-len(rest) :] == batches[step:] and read == batches[: len(read)]


def test_data_resumes_exactly_in_training(tmp_path: Path):
    def run(folder: str, steps: int) -> dict[int, float]:
        keep = Keeping(md.Checkpoints(tmp_path / folder), every=1, wait=True)
        records = list(
            train(tiny, md.Plan("all:1"), steps=steps, batches=streamed(tmp_path), eval_batches=0, keep=keep)
        )
        assert not any(record.get("changed") for record in records)
        return {record["step"]: record["loss"] for record in records if record["event"] == "step"}

    whole = run("whole", 5)
    assert {**run("parts", 2), **run("parts", 5)} == whole


@pytest.mark.parametrize("make", SOURCES)
def test_data_reads_every_row_once_an_epoch(tmp_path: Path, make: Callable[[Path], Any]):
    data = make(tmp_path)
    seen = [int(row) for step in range(1, 12) for row in data("train", step)["x"][:, 0]]
    if make is streamed:
        assert seen[:8] == [*range(8)] == seen[8:16], "a batch that is not full ends the epoch"
        return
    for epoch in range(4):
        assert sorted(seen[epoch * ROWS : (epoch + 1) * ROWS]) == [*range(ROWS)]
    assert seen[:ROWS] != seen[ROWS : 2 * ROWS]


@pytest.mark.parametrize("make", [mapped, table, streamed])
def test_data_evaluates_on_the_same_batches(tmp_path: Path, make: Callable[[Path], Any]):
    data = make(tmp_path)
    first = [data("held_out", i)["x"].tolist() for i in (0, 1)]
    assert first == [data("held_out", i)["x"].tolist() for i in (0, 1)]
    assert [row[0] for rows in first for row in rows] == [*range(8)]


def test_data_errors(tmp_path: Path):
    rows = datasets.Dataset.from_dict({"x": [values(n) for n in range(ROWS)]})
    buffered = rows.to_iterable_dataset().shuffle(buffer_size=4)
    for call, message in [
        (lambda: from_datasets(rows, batch=0), "batch is a number of rows of at least 1, got 0"),
        (lambda: from_datasets(rows, batch=12), "the train data has 11 rows, fewer than a batch of 12"),
        (lambda: from_datasets(rows, batch=4)("held_out", 0), "there is no held_out data; give held_out="),
        (lambda: from_datasets(rows.to_iterable_dataset(), batch=4)("held_out", 0), "there is no held-out data"),
        (lambda: next(from_datasets(rows.to_iterable_dataset(), batch=12).train), "fewer rows than a batch"),
        (lambda: mapped(tmp_path)("held_out", 5), "the held-out data has 3 batches, and batch 5 was asked for"),
        (lambda: from_datasets(buffered, batch=4), "has a shuffle buffer"),
    ]:
        with pytest.raises(md.MeshdslError, match=message):
            call()
    assert isinstance(mapped(tmp_path), Iterated)


def stream(first: int, count: int, shards: int = 2) -> Any:
    rows = datasets.Dataset.from_dict({"x": [values(n) for n in range(first, first + count)]})
    return rows.to_iterable_dataset(num_shards=shards)


LONG, OTHER = stream(0, 400), stream(400, 90)
STREAMS: dict[str, Any] = {
    "interleaved": (datasets.interleave_datasets([LONG, OTHER]), True),
    "by chance": (datasets.interleave_datasets([LONG, OTHER], probabilities=[0.4, 0.6], seed=1), True),
    "concatenated": (datasets.concatenate_datasets([OTHER, LONG]), True),
    "filtered": (LONG.filter(lambda row: row["x"][0] % 3 == 0).map(lambda row: {"x": row["x"]}), True),
    "shuffled": (LONG.shuffle(seed=1, buffer_size=9), False),
    "shuffled far": (LONG.shuffle(seed=1, buffer_size=150), False),
    "interleaved shuffled": (datasets.interleave_datasets([LONG.shuffle(seed=1, buffer_size=9), OTHER]), False),
    "interleaved shuffled last": (datasets.interleave_datasets([OTHER, LONG.shuffle(seed=1, buffer_size=9)]), False),
    "concatenated shuffled": (datasets.concatenate_datasets([LONG.shuffle(seed=1, buffer_size=9), OTHER]), False),
    "concatenated shuffled last": (datasets.concatenate_datasets([LONG, OTHER.shuffle(seed=1, buffer_size=9)]), False),
    "nested": (
        datasets.concatenate_datasets([OTHER, datasets.interleave_datasets([OTHER, LONG.shuffle(seed=1)])]), False,
    ),
    "random": (LONG.map(lambda row: {"x": [float(np.random.default_rng().random())] * len(row["x"])}), False),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_stream_resumes_exactly_or_is_refused(name: str):
    rows, accepted = STREAMS[name]
    if not accepted:
        with pytest.raises(md.MeshdslError, match="the stream does not continue where it was"):
            from_datasets(rows, batch=4)
        return
    data, other = from_datasets(rows, batch=4), from_datasets(rows, batch=4)
    states, batches = [], []
    for step in range(150):
        states.append(data.train.get_state())
        batches.append(data("train", step)["x"].tolist())
    assert batches[:3] == [other("train", step)["x"].tolist() for step in range(3)], "the trial reads another stream"
    for position in (0, 1, 7, 60, 99, 140):
        other.train.set_state(states[position])
        assert [other("train", 0)["x"].tolist() for _ in range(10)] == batches[position : position + 10]
