"""No command line, model file or environment gives a traceback; `python -m tests.cli.fuzz` draws many more."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from meshdsl.errors.installed import NEWEST_JAX, OLDEST_JAX
from tests.cli import fuzz
from tests.cli.running import HERE, Run, here

ROOT = HERE.parent.parent
BIGRAM = "tests/cli/workloads.py:bigram"


def test_cli_random_command_lines():
    found = fuzz.fuzz(150, seed=0)
    assert not found["failures"], "\n".join(found["failures"])


@pytest.mark.parametrize("body", fuzz.BODIES)
def test_model_files_that_go_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str):
    monkeypatch.chdir(tmp_path)
    Path("odd.py").write_bytes(fuzz.BODIES[body].encode("utf-8", "surrogateescape"))
    run = here("analyze", "odd.py:lm")
    assert run.code == (2 if body in ("prints", "empty") else 1) and run.err, run
    assert not re.search("Traceback|InternalError|\x1b", run.err), run.err


@pytest.mark.parametrize("place", fuzz.PLACES)
def test_model_functions_that_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str):
    """`sys.exit(0)` in a model file is no success."""
    monkeypatch.chdir(tmp_path)
    source = (HERE / "workloads.py").read_text()
    odd = f"\n\nimport sys\n\ndef odd(*args):\n    sys.exit(0)\n\nlm = dataclasses.replace(bigram, {place}=odd)\n"
    Path("odd.py").write_text(f"import dataclasses\n{source.replace('from __future__ import annotations', '')}{odd}")
    run = here("train", "odd.py:lm", "--steps", "1", "--eval-batches", "0")
    assert run.code == 1 and "odd.py:lm calls sys.exit(0)\n  at odd.py:" in run.err, run


def test_json_has_no_prints_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    source = (HERE / "workloads.py").read_text()
    Path("loud.py").write_text(
        source.replace("def inputs(config: Config)", "print('top')\n\n\ndef inputs(config: Config)")
    )
    run = here("analyze", "loud.py:bigram", "--json")
    assert run.code == 0 and [json.loads(line)["command"] for line in run.out.splitlines()] == ["analyze"], run
    assert "top" in run.err


def environment(arguments: list[str], **variables: str) -> Run:
    command = [sys.executable, "-m", "meshdsl", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=env)
    return Run(run.returncode, run.stdout, run.stderr)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("JAX_PLATFORMS", "nope", "JAX_PLATFORMS is 'nope'; "),
        ("JAX_NUM_CPU_DEVICES", "x", 'Invalid value "x" for JAX flag jax_num_cpu_devices'),
    ],
)
def test_cli_with_an_environment_in_which_jax_does_not_start(variable: str, value: str, message: str):
    run = environment(["train", BIGRAM, "--steps", "1"], **{variable: value})
    assert run.code == 1 and run.err.startswith(f"MeshdslError: JAX cannot start: {message}"), run
    assert "Traceback" not in run.err


def path_with_jax(version: str, folder: Path) -> str:
    """A PYTHONPATH on which the metadata of JAX has this version."""
    metadata = folder / f"jax-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: jax\nVersion: {version}\n")
    return f"{folder}{os.pathsep}{ROOT}"


def test_cli_says_first_that_jax_is_too_old(tmp_path: Path):
    path = path_with_jax("0.4.30", tmp_path)
    run = environment(["train", BIGRAM], PYTHONPATH=path)
    assert run.code == 1 and run.err.startswith("MeshdslError: meshdsl needs JAX 0.10.2 or newer; installed: 0.4.30")
    script = "import meshdsl as md\ntry: md.Dim\nexcept Exception as e: print(e)"
    env = {**os.environ, "PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=env)
    assert "needs JAX 0.10.2 or newer" in run.stdout


def test_a_jax_above_the_tested_range_is_one_warning(tmp_path: Path):
    path = path_with_jax(f"{NEWEST_JAX[0]}.{NEWEST_JAX[1] + 1}.0", tmp_path)
    script = tmp_path / "script.py"
    script.write_text("import meshdsl as md\n\nmd.Dim\nmd.tensor(1.0)\n")
    env = {**os.environ, "PYTHONPATH": path}
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, env=env)
    assert run.returncode == 0 and run.stderr.startswith(f"{script}:3: UserWarning: meshdsl is tested with")
    assert run.stderr.count("Warning") == 1


def test_the_range_of_jax_is_that_of_the_package():
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"jax>={'.'.join(map(str, OLDEST_JAX))}" in required
    installed = tuple(map(int, importlib.metadata.version("jax").split(".")[:3]))
    assert installed >= OLDEST_JAX and installed[:2] <= NEWEST_JAX


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "1" + "0" * 20], "--devices: must be an integer from 1 to 4096"),
        (["--steps", "9" * 5000], "--steps: must be an integer from 0 to 1e+15"),
        (["--steps", "\N{SUPERSCRIPT TWO}"], "--steps: must be an integer from 0"),
        (["--seed", "9" * 5000], "--seed: must be an integer"),
        (["--set", "learning_rate=-1"], "the learning rate must be at least 0, got -1.0"),
        (["--set", "learning_rate=nan"], "the learning rate must be at least 0, got nan"),
        (["--checkpoints", "x" * 300], "x: File name too long"),
        (["--config", "x" * 300], "cannot be read: File name too long"),
        (["--metrics", "x" * 300], "cannot be written"),
    ],
)
def test_cli_errors_of_values(arguments: list[str], message: str):
    run = here("train", f"{HERE / 'workloads.py'}:bigram", "--steps", "0", *arguments)
    assert run.code in (1, 2) and message in run.err, run
    assert "Traceback" not in run.err and len(run.err) < 1500
