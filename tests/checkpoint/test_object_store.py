"""Checkpoints at a URL: bitwise on every layout, committed last, and nothing lost in a run that is killed."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import meshdsl as md
from meshdsl.train import Keeping, train
from meshdsl.train.checkpoint import heartbeat
from tests.checkpoint.flips import flips
from tests.cli.running import here
from tests.train.tiny import tiny

DATA = md.Plan("all:2", "batch:all")
MODEL = md.Plan("all:2", "hidden:all")  # 5 does not divide by 2: what is stored has padding
SAVES = """
import sys
import meshdsl as md
checkpoints = md.Checkpoints(sys.argv[1], keep=2)
first = checkpoints.latest()
for step in range(0 if first is None else first + 1, 10_000):
    w, v = md.full("io:64 hidden:8", float(step)), md.full("io:64", -float(step))
    checkpoints.save(step, {"params": {"w": w, "v": v}})
    checkpoints.wait()
    print(step, flush=True)
"""


def test_a_run_resumes_bitwise_on_another_layout(tmp_path: Path):
    places = (f"file://{tmp_path}/store/run", str(tmp_path / "files"))
    for place in places:
        for steps, plan in ((2, MODEL), (3, DATA)):
            keep = Keeping(md.Checkpoints(place, keep=None), every=2, wait=True)
            list(train(tiny, plan, steps=steps, eval_batches=0, keep=keep))
    url, files = map(md.Checkpoints, places)
    assert url.steps() == files.steps() and url.latest() == 3
    for step in url.steps():
        found, want = url.restore(step), files.restore(step)
        assert found.key is not None and want.key is not None
        assert (found.config, found.data, found.key.numpy().tolist()) == (
            want.config,
            want.data,
            want.key.numpy().tolist(),
        )
        assert {p: x.numpy().tobytes() for p, x in found.tree.items()} == {
            p: x.numpy().tobytes() for p, x in want.tree.items()
        }
    like = {"params": {"w": md.spec("io:3 hidden:5")}}
    sharded = url.restore(2, like, mesh=MODEL.mesh, layout=MODEL.layout).tree["params"]["w"]
    assert sharded.numpy().tobytes() == url.restore(2).tree["params/w"].numpy().tobytes()


def test_a_run_saves_at_a_url_while_it_trains(tmp_path: Path):
    checkpoints = md.Checkpoints(f"file://{tmp_path}/run", keep=None)
    list(train(tiny, DATA, steps=6, eval_batches=0, keep=Keeping(checkpoints, every=2)))
    assert {2, 6} <= {*checkpoints.steps()} <= {2, 4, 6}  # the one of step 4 is left out while that of 2 is written


@pytest.mark.parametrize("pattern", ["meta/metadata", "state/ocdbt*/d/*"])
def test_a_flipped_bit_is_refused_or_does_not_matter(tmp_path: Path, pattern: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.CRITICAL)
    found = flips(tmp_path, 15, pattern=pattern)
    assert not any(counts["different"] for counts in found.values()), found
    assert max(counts["refused"] for counts in found.values()) >= 10, found


def test_a_moved_step_is_refused(tmp_path: Path):
    with md.Checkpoints(f"file://{tmp_path}/run", keep=None) as checkpoints:
        checkpoints.save(2, {"w": md.full("io:4", 2.0)})
        checkpoints.wait()
        os.rename(tmp_path / "run" / "step-00000002", tmp_path / "run" / "step-00000001")
        with pytest.raises(md.CheckpointError, match="it is step 2, moved"):
            checkpoints.restore(1)


def test_a_step_of_0_2_0_is_read(tmp_path: Path):
    """It has no hash of what it says about itself, and no sums of bits; a step that has one of the two needs both."""
    checkpoints = md.Checkpoints(f"file://{tmp_path}/run")
    checkpoints.save(2, {"w": md.full("io:4", 2.0)}, data={"batch": 64})
    checkpoints.wait()
    file = tmp_path / "run" / "step-00000002" / "meta" / "metadata"
    meta = json.loads(file.read_text())
    for removed in ("sums", "sha256"):
        file.write_text(json.dumps({name: x for name, x in meta.items() if name != removed}))
        with pytest.raises(md.CheckpointError, match="its meta does not have its SHA-256"):
            checkpoints.restore(2)
    file.write_text(json.dumps({name: x for name, x in meta.items() if name not in ("sums", "sha256")}))
    (tmp_path / "run" / "owner").unlink()
    (tmp_path / "run" / "newest").unlink()
    checkpoints.verify(2)
    restored = checkpoints.restore()
    assert (restored.step, restored.data, restored.tree["w"].numpy().tolist()) == (2, {"batch": 64}, [2.0] * 4)
    checkpoints.close()


def test_the_newest_step_is_missed(tmp_path: Path):
    said: list[str] = []
    with md.Checkpoints(f"file://{tmp_path}/run", report=said.append) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"w": md.full("io:4", float(step))})
        checkpoints.wait()
        checkpoints.discard(2)
        assert checkpoints.restore().step == 2 and said == []
        (tmp_path / "run" / "step-00000002").rename(tmp_path / "aside")
        assert checkpoints.restore().step == 1
        assert said == [f"step-00000002 was saved in {tmp_path}/run and is missing now"]
        (tmp_path / "run" / "newest").write_text("{" * 9)
        assert checkpoints.restore().step == 1 and len(said) == 1, "a damaged one is ignored"


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    url, tree = f"file://{tmp_path}/run", {"w": md.full("io:4", 1.0)}
    file, unfinished = tmp_path / "run" / "owner", tmp_path / "run" / "step-00000002.orbax-checkpoint-tmp"
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.05)
    said: list[str] = []
    second = md.Checkpoints(url, take_over=True, report=said.append)
    with md.Checkpoints(url) as first:
        first.save(1, tree)
        first.wait()
        unfinished.mkdir()
        for other in (md.Checkpoints(url), second):
            with pytest.raises(md.SaveError, match=f"process {os.getpid()} on .*, whose last heartbeat was 0 s ago"):
                other.claim()
        assert unfinished.exists() and [line[:32] for line in said] == ["waiting 0 s for a heartbeat of p"]
        record = json.loads(file.read_text())
        file.write_text(json.dumps({**record, "token": "another", "time": time.time()}))
        with pytest.raises(md.SaveError, match="was taken over by process"):
            first.save(2, tree)
    assert json.loads(file.read_text())["token"] == "another", "what is another's stays"
    second.claim()
    assert not unfinished.exists()
    second.close()
    assert not file.exists()


@pytest.mark.parametrize(
    ("changes", "replaced"),
    [
        ({"began": "1"}, True),  # the process has ended, and another one has its number
        ({"began": "1", "namespace": "pid:[1]"}, False),  # of another container
        ({"began": "1", "boot": "another"}, False),
        ({"time": 1.0}, True),
        ({"time": 9e9}, False),
        ({"time": "soon"}, True),  # damaged
    ],
)
def test_an_owner_that_has_ended_is_replaced(tmp_path: Path, changes: dict[str, object], replaced: bool):
    url, file = f"file://{tmp_path}/run", tmp_path / "run" / "owner"
    with md.Checkpoints(url) as checkpoints:
        checkpoints.claim()
        record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, **changes}))
    with md.Checkpoints(url) as checkpoints:
        if replaced:
            checkpoints.claim()
        else:
            with pytest.raises(md.SaveError, match="is being written by process"):
                checkpoints.claim()


def test_an_uncommitted_step_is_neither_listed_nor_in_the_way(tmp_path: Path):
    with md.Checkpoints(f"file://{tmp_path}/run", keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"w": md.full("io:4", float(step))})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3]
        unfinished = tmp_path / "run" / "step-00000004.orbax-checkpoint-tmp"
        os.rename(tmp_path / "run" / "step-00000003", unfinished)
        with pytest.warns(RuntimeWarning, match="step-00000003 was saved in .* and is missing now"):
            assert checkpoints.restore().step == 2
        checkpoints.save(4, {"w": md.full("io:4", 4.0)})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 4] and not unfinished.exists()
        with pytest.raises(md.SaveError, match="step-00000004 already exists"):
            checkpoints.save(4, {"w": md.full("io:4", 4.0)})
        for part in (tmp_path / "run" / "step-00000004" / "state").rglob("d/*"):
            part.write_bytes(b"")
        with pytest.warns(RuntimeWarning, match="skipped step-00000004"):
            assert checkpoints.restore().step == 2
        with pytest.raises(md.ShapeError, match="w: is float"):
            checkpoints.restore(2, {"w": md.spec("io:5")})


@pytest.mark.filterwarnings("ignore")  # of orbax about itself
def test_a_step_at_a_url_is_exported(tmp_path: Path):
    url, tree = f"file://{tmp_path}/run", {"params": {"w": md.full("io:3 hidden:2", 2.0)}, "state": md.full("", 1.0)}
    with md.Checkpoints(url) as checkpoints:
        checkpoints.save(7, tree, config={"lr": 0.1}, key=md.random.key(3))
        checkpoints.wait()
        assert checkpoints.verify(7) is None and checkpoints.latest() == 7
        md.export_safetensors(checkpoints, 7, tmp_path / "w.safetensors", prefix="params/")
        md.export_orbax(checkpoints, 7, tmp_path / "orbax")
        with pytest.raises(md.CheckpointError, match="there is no step-00000008"):
            md.export_safetensors(checkpoints, 8, tmp_path / "x.safetensors")
    (path, w), *others = md.import_safetensors(tmp_path / "w.safetensors").items()
    assert (path, w.dims, others) == ("w", tree["params"]["w"].dims, []) and (w.numpy() == 2.0).all()
    assert sorted(md.import_orbax(tmp_path / "orbax")) == ["params/w", "state"]
    run = here("export", url, str(tmp_path / "again.safetensors"), "--params-only")
    assert (run.code, run.out) == (0, f"step 7 written to {tmp_path}/again.safetensors\n"), run
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "w.safetensors").read_bytes()
    missing = here("export", url, str(tmp_path / "no.safetensors"), "--step", "8")
    assert missing.code == 2 and f"{url} has no step 8\n  steps: 7" in missing.err, missing


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(md.MeshdslError, match=r"pip install 'orbax-checkpoint>=.*', or use meshdsl's own format"):
        md.Checkpoints("gs://bucket/run")


def killed(folder: Path, seconds: float) -> tuple[int, int]:
    """Save until killed; the last step that was reported, and the newest found afterwards."""
    command = [sys.executable, "-c", SAVES, f"file://{folder}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline()]
    time.sleep(seconds)
    process.kill()
    lines += process.communicate()[0].splitlines()
    done = int([line for line in lines if line.strip()][-1])
    found = md.Checkpoints(f"file://{folder}").restore()
    assert (found.tree["params/w"].numpy() == found.step).all() and (
        found.tree["params/v"].numpy() == -found.step
    ).all()
    return done, found.step


@pytest.mark.slow
def test_a_hundred_kills_lose_nothing(tmp_path: Path):
    for n in range(100):
        done, found = killed(tmp_path / "run", 0.0037 * n)
        assert done <= found <= done + 1, (done, found)
