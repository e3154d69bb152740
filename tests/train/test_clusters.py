"""`meshdsl train` under a cluster starts as one of its processes without options; the environment is simulated."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

import meshdsl as md
from meshdsl.tools.commands import devices
from meshdsl.train import resolve
from meshdsl.train.checkpoint.directory import step_numbers
from tests.cli.running import here
from tests.together import free_port
from tests.train import endings

ROOT = Path(__file__).parent.parent.parent


def slurm(rank: int, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4711", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_NODES": "1", "JAX_COORDINATOR_PORT": str(port),
    }  # fmt: skip


def open_mpi(rank: int, port: int) -> dict[str, str]:
    return {
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1,10.148.0.1:34911", "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "JAX_COORDINATOR_PORT": str(port),
    }  # fmt: skip


def tpu_pod(rank: int, port: int) -> dict[str, str]:
    return {
        "TPU_WORKER_HOSTNAMES": "localhost,localhost", "TPU_WORKER_ID": str(rank), "JAX_COORDINATOR_PORT": str(port),
        "MEGASCALE_COORDINATOR_ADDRESS": "localhost", "MEGASCALE_NUM_SLICES": "1", "MEGASCALE_SLICE_ID": "0",
        "JAX_FORCE_TPU_INIT": "1",  # as if chips were attached; --devices then selects the CPU
    }  # fmt: skip


def kubernetes(rank: int, port: int) -> dict[str, str]:
    return {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": str(rank), "HOSTNAME": f"train-{rank}",
        "JAX_COORDINATOR_PORT": str(port), "PYTHONPATH": f"{ROOT / 'tests' / 'train' / 'pod'}:{ROOT}",
        "JAX_PLATFORMS": "cpu", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }  # fmt: skip


# A pod has names of other pods, and a file with its namespace: both are mounted where only this process sees them.
POD = """
mount --bind "$0" /etc/hosts && mount -t tmpfs none /var/run && mkdir -p /var/run/secrets/kubernetes.io/serviceaccount
printf team > /var/run/secrets/kubernetes.io/serviceaccount/namespace && exec "$@"
"""
UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")


def in_a_pod(folder: Path) -> list[str]:
    """The start of a command that runs as in a pod; skips the test where mount namespaces are not permitted."""
    hosts = folder / "hosts"
    names = " ".join(f"train-{i} train-{i}.jaxpods" for i in range(2))
    hosts.write_text(f"127.0.0.1 localhost {socket.gethostname()} {names}\n")
    command = [*UNSHARE, POD, str(hosts)]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("this machine permits no mount namespaces")
    return command


@pytest.mark.slow
@pytest.mark.parametrize("environment", [slurm, open_mpi, kubernetes, tpu_pod])
def test_train_under_a_cluster(tmp_path: Path, environment: Any):
    port = free_port()
    command = [sys.executable, "-m", "meshdsl", "train", "tests/train/tiny.py:tiny", "--layout", "data", "--json"]
    command += ["--steps", "3", "--checkpoints", str(tmp_path / "run")]
    if environment is kubernetes:  # the number of pods is known only to the API, so each has its one device
        command = [*in_a_pod(tmp_path), *command]
    else:
        command += ["--devices", "2"]
    runs = [
        subprocess.Popen(
            command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, **environment(rank, port)},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [run.communicate(timeout=240) for run in runs]
    finally:
        for run in runs:
            run.kill()
            run.wait()
    assert [run.returncode for run in runs] == [0, 0], said
    events = [json.loads(line)["event"] for line in said[0][0].splitlines()]  # also Gloo's own line goes to stderr
    assert events[0] == "start" and events[-1] == "end" and said[1][0] == "", said
    assert step_numbers(tmp_path / "run")[-1] == 3
    assert len(list((tmp_path / "run" / "step-00000003").glob("part-*.bin"))) == 2, "each process writes its part"


KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
TPU = {"TPU_WORKER_HOSTNAMES": "a,b,c,d", "TPU_WORKER_ID": "1"}


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        (slurm(0, 1), "SLURM"),
        (open_mpi(0, 1), "Open MPI"),
        (KUBERNETES, "Kubernetes"),
        (TPU, "a TPU pod"),
        ({**TPU, "TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, "a TPU pod"),
        ({"TPU_PROCESS_ADDRESSES": "a:8471,b:8471"}, "a TPU pod"),
        ({"MEGASCALE_COORDINATOR_ADDRESS": "a"}, "a TPU pod"),
        ({}, None),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # a batch script, without srun
        ({**slurm(0, 1), "SLURM_NTASKS": "1"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # a pod that is not one of an indexed job
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
    ],
)
def test_start_finds_the_cluster(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str], name: str | None):
    calls: list[tuple[Any, ...]] = []
    found = devices.cluster_of(environment)
    assert (found.name if found else None) == name
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(jax.config, "update", lambda *setting: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args: calls.append(args))
    options = SimpleNamespace(coordinator=None, processes=None, process=None, devices=None, cluster="auto")
    devices.start(options, md.Mesh("all:1"))  # type: ignore[arg-type]  # only these fields are read
    assert calls == ([(None, None, None)] if name else [])
    options.cluster = "none"
    devices.start(options, md.Mesh("all:1"))  # type: ignore[arg-type]
    assert len(calls) == bool(name)


def test_start_names_the_cluster_that_does_not_answer(monkeypatch: pytest.MonkeyPatch):
    def unreachable(*args: Any) -> None:
        raise RuntimeError("deadline exceeded")

    for variable, value in slurm(0, 1).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(jax.config, "update", lambda *setting: None)
    monkeypatch.setattr(jax.distributed, "initialize", unreachable)
    options = SimpleNamespace(coordinator=None, processes=None, process=None, devices=None, cluster="auto")
    with pytest.raises(md.MeshdslError, match="could not connect under SLURM: deadline exceeded\n  to run as a single"):
        devices.start(options, md.Mesh("all:1"))  # type: ignore[arg-type]
    options.devices = 3
    with pytest.raises(md.MeshdslError, match="--devices 3 cannot be divided among 2 processes"):
        devices.start(options, md.Mesh("all:1"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fault", "where", "codes"), [("raise", 1, [69, 1]), ("kill", 0, [-9, 69]), ("data", 1, [2, 2])]
)
def test_processes_of_a_run_end_within_seconds_when_one_does(fault: str, where: int, codes: list[int], tmp_path: Path):
    found = endings.ended(fault, where, tmp_path)
    assert found.codes == codes and found.seconds < 20  # 10 on a quiet machine
    said = found.said[1 - where]
    assert {
        "raise": "process 1 ended: ValueError: row 7 of shard 2 is broken\n  so process 0 ends in step",
        "kill": "process 0 is gone: it was killed, or its host is\n  so process 1 ends in step",
        "data": "the processes of this run differ in what they store of step 4\n  ['params']['v']",
    }[fault] in said, said


@pytest.mark.parametrize(
    ("mesh", "devices", "filled"),
    [("all:*", 3, "all:3"), ("rows:*;cols:2", 6, "rows:3;cols:2"), ("rows:2", 8, "rows:2"), ("rows:*", None, "rows:1")],
)
def test_a_mesh_axis_fills_the_devices(mesh: str, devices: int | None, filled: str):
    settings = resolve("tests/train/tiny.py:tiny", options={"mesh": mesh, "layout": "batch:rows"})
    assert str(settings.run_plan(devices).mesh) == str(md.Mesh(filled))
    assert settings.to_dict()["mesh"] == mesh, "what is saved with a run is what was asked for"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--mesh", "rows:*;cols:3", "--devices", "8"), "8 devices cannot be divided by 3, the size of the other axes"),
        (("--mesh", "rows:*;cols:*", "--devices", "8"), "a mesh axis is written name:size"),
        (("--mesh", "rows:*2", "--devices", "8"), "a mesh axis is written name:size"),
        (("--mesh", "rows:*", "--dry-run"), "--dry-run knows no devices that fill the mesh 'rows:*'; add --devices N"),
    ],
)
def test_a_mesh_that_cannot_fill_the_devices_says_why(options: tuple[str, ...], message: str):
    run = here("train", "tests/train/tiny.py:tiny", "--layout", "batch:rows", *options)
    assert run.code in (2, 3) and message in run.err, run
