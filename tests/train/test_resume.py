"""A run that is stopped or killed and resumed is, bit for bit, the run that was not."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.train import Iterated, Keeping, NonFiniteLoss, Stop, Stopped, UsageError, data_for, peers, train
from meshdsl.train.loop import _Keys
from meshdsl.train.state import State
from tests.train import two
from tests.train.tiny import tiny

ONE = md.Plan("all:1")
DATA = md.Plan("all:2", "batch:all")
SHARDED = DATA.replace(weight_update="sharded")
MODEL = md.Plan("all:2", "hidden:all")  # 5 does not divide by 2: what is stored has padding
Records = list[dict[str, Any]]


def keeping(folder: Path, every: int = 3, resume: str = "auto", said: list[str] | None = None, **more: Any) -> Keeping:
    lines: list[str] = [] if said is None else said
    return Keeping(md.Checkpoints(folder, keep=None, report=lines.append), every, resume, more or None, wait=True)


def run(plan: md.Plan, steps: int, keep: Keeping, **options: Any) -> Records:
    return list(train(tiny, plan, steps=steps, eval_batches=0, keep=keep, **options))


def saved(folder: Path, step: int) -> tuple[dict[str, bytes], Any, Any]:
    """Every bit of a step: its tensors by path, the data position, the random key."""
    found = md.Checkpoints(folder).restore(step)
    assert found.key is not None
    return {path: x.numpy().tobytes() for path, x in found.tree.items()}, found.data, found.key.numpy().tobytes()


def losses(records: Records) -> list[float]:
    return [r["loss"] for r in records if r["event"] == "step"]


def test_resume_is_bitwise_equal_also_on_other_layouts(tmp_path: Path):
    step = random.SystemRandom().randrange(1, 6)
    whole = run(SHARDED, 7, keeping(tmp_path / "whole", 1))
    first = run(SHARDED, step, keeping(tmp_path / "parts", 100))
    second = run(SHARDED, 7, keeping(tmp_path / "parts", 100))
    assert losses(first) + losses(second) == losses(whole)
    assert saved(tmp_path / "parts", 7) == saved(tmp_path / "whole", 7)
    for plan in (MODEL, ONE):
        keep = keeping(tmp_path / f"on{plan.layout}", 100, str(tmp_path / "whole" / f"step-{step:08d}"))
        there = keep.checkpoints.directory
        assert list(train(tiny, plan, steps=step, eval_batches=0, keep=keep))[1]["step"] == step
        assert saved(there, step) == saved(tmp_path / "whole", step), "every bit, whatever the layout"
        on = run(plan, 7, keeping(there, 100))
        assert losses(on) == pytest.approx(losses(whole)[step:], rel=1e-5)


class Raising:
    """Raises the flag of a signal when a phase is reached: what the handler does, at a known moment."""

    def __init__(self, stop: Stop, split: str, at: int):
        self.stop, self.split, self.at, self.data = stop, split, at, data_for(tiny, 0)

    def __call__(self, split: str, step: int) -> Any:
        if (split, step) == (self.split, self.at):
            self.stop.note(signal.SIGTERM)
        return self.data(split, step)


# The phase, the batch that is drawn in it, the step that is saved.
PHASES = [
    ("compile", "train", 1, 1),
    ("warm-up", "train", 2, 2),
    ("step", "train", 4, 4),
    ("evaluation", "held_out", 1, 2),
]


@pytest.mark.parametrize(("phase", "split", "at", "step"), PHASES, ids=[p[0] for p in PHASES])
def test_stop_saves_in_each_phase(tmp_path: Path, phase: str, split: str, at: int, step: int):
    stop = Stop()
    options: dict[str, Any] = {"steps": 6, "eval_every": 2, "eval_batches": 3, "stop": stop}
    with pytest.raises(Stopped, match=f"stopped by SIGTERM; step {step} is saved") as caught:
        list(train(tiny, ONE, keep=keeping(tmp_path), batches=Raising(stop, split, at), **options))
    assert caught.value.exit_code == 75
    assert md.Checkpoints(tmp_path).latest() == step
    assert not (tmp_path / "lock").exists()


def test_stop_before_the_first_step_and_while_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stop = Stop()
    stop.note(signal.SIGINT)
    with pytest.raises(Stopped, match="SIGINT; step 0 is saved") as caught:
        run(ONE, 5, keeping(tmp_path / "a"), stop=stop)
    assert caught.value.exit_code == 130
    later, real = Stop(), md.Checkpoints.save

    def save(self: Any, *args: Any, **options: Any) -> bool:
        later.note(signal.SIGTERM)
        return real(self, *args, **options)

    with monkeypatch.context() as patch, pytest.raises(Stopped, match="step 3 is saved"):
        patch.setattr(md.Checkpoints, "save", save)
        run(ONE, 5, keeping(tmp_path / "a"), stop=later)
    assert md.Checkpoints(tmp_path / "a").steps() == [0, 3]
    run(ONE, 5, keeping(tmp_path / "a"))
    run(ONE, 5, keeping(tmp_path / "b"))
    assert saved(tmp_path / "a", 5) == saved(tmp_path / "b", 5)


def test_stop_second_signal_exits_at_once(monkeypatch: pytest.MonkeyPatch):
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.now(), codes) == (signal.SIGTERM, [])
        os.kill(os.getpid(), signal.SIGINT)
        assert codes == [130]


def test_resume_skips_corrupt_checkpoints(tmp_path: Path):
    run(ONE, 6, keeping(tmp_path, 2))
    for step in (6, 4, 2):
        part = tmp_path / f"step-{step:08d}" / "part-00000.bin"
        raw = bytearray(part.read_bytes())
        raw[len(raw) // 2] ^= 1
        part.write_bytes(bytes(raw))
        said: list[str] = []
        if step > 2:
            records = run(ONE, 6, keeping(tmp_path, 2, said=said))
            assert records[1]["step"] == step - 2 and any(f"step-{step:08d}" in line for line in said)
            assert md.Checkpoints(tmp_path).latest() == 6, "what was corrupt is written again"
            (tmp_path / "step-00000006").rename(tmp_path / f"aside-{step}")
    for part in tmp_path.glob("step-????????/part-00000.bin"):
        part.write_bytes(part.read_bytes() + b"\0")
    with pytest.raises(md.CheckpointError, match="there is no valid checkpoint") as caught:
        run(ONE, 6, keeping(tmp_path, 2))
    assert caught.value.exit_code == 4  # type: ignore[attr-defined]


def test_resume_evaluates_what_was_due(tmp_path: Path):
    """A run that ends between the save of a step and its evaluation evaluates when it resumes."""
    options: dict[str, Any] = {"steps": 5, "eval_every": 2, "eval_batches": 1}
    whole = list(train(tiny, ONE, **options))
    for ends in ("save", "step"):  # after the save of step 2, and by a signal in step 2, before it is due to be saved
        records: Records = []
        stop = Stop()
        keep = keeping(tmp_path / ends, 2 if ends == "save" else 100)
        try:
            for record in train(tiny, ONE, keep=keep, stop=stop, **options):
                records.append(record)
                if record["event"] == ends and record["step"] == (2 if ends == "save" else 1):
                    stop.note(signal.SIGTERM) if ends == "step" else keep.checkpoints.close()
                    if ends == "save":
                        break
        except Stopped as stopped:
            assert stopped.step == 2
        records += train(tiny, ONE, keep=keeping(tmp_path / ends, 2), **options)
        found = {record["step"]: record["loss"] for record in records if record["event"] == "eval"}
        assert found == {record["step"]: record["loss"] for record in whole if record["event"] == "eval"}, ends


class Counting:
    """An iterator whose batches depend only on its position, which is bytes, as Grain's may be."""

    def __init__(self) -> None:
        self.position, self.noise = 0, data_for(tiny, 0)

    def __next__(self) -> Any:
        if self.position == 9:
            raise StopIteration
        self.position += 1
        return self.noise("train", self.position)

    def get_state(self) -> bytes:
        return str(self.position).encode()

    def set_state(self, state: bytes) -> None:
        self.position = int(state)


def test_resume_continues_an_iterator(tmp_path: Path):
    def batches() -> Iterated:
        return Iterated(Counting(), held_out=lambda i: data_for(tiny, 0)("held_out", i))

    whole = run(ONE, 7, keeping(tmp_path / "whole"), batches=batches())
    parts = run(ONE, 4, keeping(tmp_path / "parts"), batches=batches())
    parts += run(ONE, 7, keeping(tmp_path / "parts"), batches=batches())
    assert losses(parts) == losses(whole) == losses(run(ONE, 7, keeping(tmp_path / "function")))
    with pytest.raises(UsageError, match="stores the position of an iterator, and this run's data differs"):
        run(ONE, 8, keeping(tmp_path / "whole"))
    with pytest.raises(UsageError, match="stores no position of an iterator"):
        run(ONE, 8, keeping(tmp_path / "function"), batches=batches())
    with pytest.raises(md.MeshdslError, match="ended before step 10"):
        run(ONE, 10, keeping(tmp_path / "whole"), batches=batches())
    with pytest.raises(md.MeshdslError, match="has the methods __next__, get_state and set_state; got list_iterator"):
        Iterated(iter([]), held_out=lambda i: {})  # type: ignore[arg-type]  # the mistake that is tested


def test_keys_of_many_steps_are_those_of_each():
    key = md.random.key(3)
    keys = _Keys(key)
    for step in (1, 2, 512, 513, 7, 2**32 - 1):
        assert np.array_equal(keys.at(step).numpy(), md.random.fold_in(key, step).numpy()), step


class Described:
    """Batches that say what they are."""

    def __init__(self, **fields: Any):
        self.data, self.fields = data_for(tiny, 0), fields

    def __call__(self, split: str, step: int) -> Any:
        return self.data(split, step)

    def describe(self) -> dict[str, Any]:
        return {"kind": "files", **self.fields}


def test_resume_reports_changed_data(tmp_path: Path):
    hostile = "\x1b]0;owned\x07"
    run(ONE, 1, keeping(tmp_path), batches=Described(sha256="abc", files={"a": 1, "b": hostile}))
    records = run(ONE, 2, keeping(tmp_path), batches=Described(sha256="abd", files={"a": 1, "b": 2}))
    lines = ["data.files.b was \\x1b]0;owned\\x07, now it is 2", "data.sha256 was abc, now it is abd"]
    assert records[1]["changed"] == lines
    assert run(ONE, 3, keeping(tmp_path), batches=Described(sha256="abd", files={"a": 1, "b": 2}))[1]["changed"] == []
    records = run(ONE, 4, keeping(tmp_path), batches=Described(long="x" * 10_000))
    assert any(line.startswith("data.sha256 was") for line in records[1]["changed"])
    assert run(ONE, 5, keeping(tmp_path), batches=Described(long="x" * 10_000))[1]["changed"] == []


def nan_at(*steps: int) -> Callable[[str, int], Any]:
    data = data_for(tiny, 0)
    return lambda split, step: {k: v * (np.nan if step in steps else 1) for k, v in data(split, step).items()}


def test_train_non_finite_step_changes_nothing(tmp_path: Path):
    records = run(ONE, 5, keeping(tmp_path, 1), batches=nan_at(3, 5), non_finite="skip")
    assert [(r["step"], r["loss"]) for r in records if r.get("skipped") and r["event"] == "step"] == [
        (3, None),
        (5, None),
    ]
    assert records[-1]["skipped"] == 2
    assert saved(tmp_path, 3)[0] == saved(tmp_path, 2)[0] != saved(tmp_path, 4)[0]
    assert saved(tmp_path, 5)[1] == {"step": 5, "seed": 0, "skipped": 2, "skipped_in_a_row": 1}
    with pytest.raises(NonFiniteLoss, match="3 steps in a row were skipped"):  # one of them before the resume
        run(ONE, 9, keeping(tmp_path, 1), batches=nan_at(6, 7, 8), non_finite="skip", max_skips=3)
    assert md.Checkpoints(tmp_path).latest() == 6
    with pytest.raises(NonFiniteLoss, match="the loss of step 7 is nan") as caught:
        run(ONE, 9, keeping(tmp_path, 1), batches=nan_at(7))
    assert caught.value.exit_code == 5


@pytest.mark.parametrize(
    ("resume", "seed", "message"),
    [
        ("never", 0, "--resume never, but .* has checkpoints up to step 2"),
        ("auto", 1, "was trained with seed 0, and this run has 1"),
        ("nowhere", 0, "auto, never or the path of a checkpoint; there is no 'nowhere'"),
    ],
)
def test_resume_errors(tmp_path: Path, resume: str, seed: int, message: str):
    keep = keeping(tmp_path, 2, resume)
    with md.Checkpoints(tmp_path) as checkpoints:
        like = {"params": {"w": md.tensor(np.zeros((3, 5), np.float32), "io hidden")}}
        state = State(like, step=2)
        Keeping(checkpoints).save(state, 0, wait=True)
    with pytest.raises(UsageError, match=message):
        keep.restore({"params": {"w": md.spec("io:3 hidden:5")}}, _program(), seed)


def _program() -> md.Program:
    def f(params: dict[str, md.Tensor]) -> md.Tensor:
        return params["w"] * 2

    return md.compile(f, plan=ONE).program({"w": md.spec("io:3 hidden:5")})


def test_stop_of_two_processes_at_the_same_step(tmp_path: Path):
    """Process 1 alone gets the signal; both save one step and exit with 75. One process of one device goes on."""
    ended = two.stopped(tmp_path / "c", "step", 1, signal.SIGTERM, "--weight-update", "sharded")
    assert ended.codes == [75, 75], ended.said
    step = md.Checkpoints(tmp_path / "c").latest()
    assert step and all(f"Stopped: stopped by SIGTERM; step {step} is saved" in text for text in ended.said), ended.said
    records = run(ONE, step + 2, keeping(tmp_path / "c"))
    assert records[1]["step"] == step and len(losses(records)) == 2


RATE = 0.01
OPTIMIZERS: dict[str, Any] = {
    "adam": lambda: md.optim.adam(RATE),
    "sgd": lambda: md.optim.sgd(RATE),
    "momentum": lambda: md.optim.momentum(RATE),
    "lamb": lambda: md.optim.lamb(RATE),
    "average": lambda: md.optim.with_average(md.optim.adam(RATE)),
    "frozen": lambda: md.optim.with_frozen(md.optim.adam(RATE), lambda path: path == "w"),
    "accumulation": lambda: md.optim.with_accumulation(md.optim.adam(RATE), 2),
}
CHANGES = [  # from, to, kept, dropped, made
    ("adam", "sgd", ["step"], ["m of v and w", "v of v and w"], []),
    ("average", "adam", ["m of v and w", "step", "v of v and w"], ["average of v and w"], []),
    ("adam", "frozen", ["m of v", "step", "v of v"], ["m of w", "v of w"], []),
    ("frozen", "adam", ["m of v", "step", "v of v"], [], ["m of w", "v of w"]),
    ("momentum", "lamb", ["m of v and w", "step"], [], ["v of v and w"]),
    ("adam", "accumulation", ["m of v and w", "step", "v of v and w"], [], ["part", "total of v and w"]),
]


@pytest.mark.parametrize(("before", "after", "kept", "dropped", "made"), CHANGES)
def test_resume_with_another_optimizer_says_what_it_drops_and_makes(
    tmp_path: Path, before: str, after: str, kept: list[str], dropped: list[str], made: list[str]
):
    def of(name: str) -> md.Workload:
        return dataclasses.replace(tiny, optimizer=lambda c: OPTIMIZERS[name]())

    def go(name: str, steps: int, **options: Any) -> Records:
        return list(train(of(name), DATA, steps=steps, eval_batches=0, keep=keeping(tmp_path, 100), **options))

    go(before, 3)
    stored = md.Checkpoints(tmp_path).restore(3).tree
    with pytest.raises(UsageError, match="has the state of another optimizer") as caught:
        go(after, 3)
    lists = {"kept": kept, "dropped": dropped, "made": made}
    line = "optimizer state: " + "; ".join(f"{name} {', '.join(x) or 'none'}" for name, x in lists.items())
    assert line in str(caught.value) and "--optimizer-changed" in str(caught.value)
    resumed = go(after, 3, optimizer_changed=True)[1]
    assert resumed["optimizer_state"] == lists and line in resumed["changed"]
    records = go(after, 4, optimizer_changed=True)
    found = md.Checkpoints(tmp_path).restore(4).tree
    assert {p.split("/")[1] for p in found} == {"v", "w", *(e.split()[0] for e in (*kept, *made))}
    assert len(losses(records)) == 1
    if after == "average":  # it begins as the restored parameters
        mean = 0.999 * stored["params/w"].numpy() + 0.001 * found["params/w"].numpy()
        np.testing.assert_allclose(found["state/average/w"].numpy(), mean, rtol=1e-6)


def test_resume_with_an_optimizer_of_the_same_state_names_it(tmp_path: Path):
    run(DATA, 2, keeping(tmp_path, 100))
    lamb = dataclasses.replace(tiny, optimizer=lambda c: OPTIMIZERS["lamb"]())
    records = list(train(lamb, DATA, steps=3, eval_batches=0, keep=keeping(tmp_path, 100)))
    assert records[1]["changed"] == ["optimizer was adam, now it is lamb"]
    assert run(DATA, 4, keeping(tmp_path, 100))[1]["changed"] == ["optimizer was lamb, now it is adam"]


@pytest.mark.parametrize(("now", "said"), [(8, "8 rows are skipped"), (2, "4 rows are seen twice"), (4, "")])
def test_resume_with_another_batch_says_what_happens_to_rows(tmp_path: Path, now: int, said: str):
    def of(batch: int) -> tuple[md.Workload, Any]:
        rows = np.arange(120, dtype=np.float32).reshape(40, 3) / 100
        return tiny.replace(batch=batch), lambda split, step: {"x": rows[np.arange(batch) + step * batch]}

    for batch, steps in ((4, 2), (now, 3)):
        workload, data = of(batch)
        records = list(train(workload, DATA, steps=steps, eval_batches=0, batches=data, keep=keeping(tmp_path, 100)))
    lines = [line for line in records[1]["changed"] if "rows" in line]
    assert [said in line for line in lines] == ([True] if said else [])


def test_resume_with_other_versions_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run(DATA, 1, keeping(tmp_path, 100))
    monkeypatch.setattr("meshdsl.train.loop.versions", lambda: {**peers.versions(), "jax": "0.99"})
    changed = run(DATA, 2, keeping(tmp_path, 100))[1]["changed"]
    assert changed == [f"versions.jax was {jax.__version__}, now it is 0.99"]
