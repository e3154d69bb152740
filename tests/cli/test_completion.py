"""Completion scripts know every command and option of the parser; colours appear in terminals only."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meshdsl.tools import cli
from meshdsl.tools.commands import colours, completion

ROOT = Path(__file__).parent.parent.parent
COMMANDS = completion.commands_of(cli.parser().commands())


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_completion_has_every_command_and_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert list(COMMANDS) == [m.__name__.rpartition(".")[2].rstrip("_") for group in cli.GROUPS.values() for m in group]
    missing = [
        f"{command} {option.name}"
        for command, (_, options) in COMMANDS.items()
        for option in options
        if (f"-l {option.name[2:]}" if shell == "fish" else option.name) not in text
    ]
    assert not missing
    assert {"overlap", "machine"} <= {option.name[2:] for option in COMMANDS["analyze"][1] if option.values}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["an"], "analyze"),
        (["--ver"], "--version"),
        (["analyze", "--mach"], "--machine"),
        (["analyze", "--machine", "tpu-v5"], "tpu-v5e tpu-v5p"),
        (["train", "--weight-update", "sh"], "sharded"),
        (["analyze", "--batch", ""], ""),
        (["analyze", "mo"], "models"),
        (["analyze", "--html", "mo"], "models"),
        (["import", "--model", "gp"], "gpt2"),
        (["analyze", "MODELS/resnet.py", ":"], "resnet50 digits"),  # bash divides words at colons
        (["analyze", "MODELS/resnet.py", ":", "di"], "digits"),
        (["analyze", "MODELS/mlp.py", ":", "mlp", "--layout", "da"], "data data_model"),
        (["train", "MODELS/gpt2.py", ":", "gpt2_xl", "--layout", "ze"], "zero zero_context"),
        (["train", "none.py", ":", "lm", "--layout", ""], ""),
    ],
    ids=" ".join,
)
def test_completion_in_bash(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    (tmp_path / "models").mkdir()
    words = [word.replace("MODELS", str(ROOT / "models")) for word in words]
    typed = " ".join(f"'{word}'" for word in ["meshdsl", *words])
    line = " ".join(["meshdsl", *words]).replace(" : ", ":")
    command = f'meshdsl() {{ PYTHONPATH={ROOT} {sys.executable} -m meshdsl "$@"; }}\n'
    ask = f'COMP_WORDS=({typed}); COMP_CWORD={len(words)}; COMP_LINE="{line}"; _meshdsl; echo "${{COMPREPLY[*]}}"'
    run = subprocess.run(
        [bash, "-c", command + script("bash", capsys) + ask], capture_output=True, text=True, timeout=20, cwd=tmp_path
    )
    assert (run.stdout.strip(), run.stderr) == (expected, "")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_is_a_script_of_the_shell(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    file = tmp_path / "script"
    file.write_text(script(shell, capsys), encoding="utf-8")
    run = subprocess.run([program, "-n", str(file)], capture_output=True, text=True, timeout=20)
    assert (run.returncode, run.stderr) == (0, "")


def test_completion_of_an_unknown_shell_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "csh"]) == 2
    assert "invalid choice: 'csh'" in capsys.readouterr().err


def in_terminal(*arguments: str, **environment: str) -> str:
    """The output of the command in a terminal."""
    main, terminal = pty.openpty()
    env = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"TERM": "xterm", **environment}
    command = [sys.executable, "-m", "meshdsl", *arguments]
    with subprocess.Popen(command, stdout=terminal, stderr=terminal, env=env, cwd=ROOT) as process:
        os.close(terminal)
        shown = b""
        while True:
            try:
                part = os.read(main, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
    os.close(main)
    assert process.returncode in (0, 4)
    return shown.decode()


def test_colours_in_a_terminal_only() -> None:
    assert "\033[1mexamples:\033[0m" in in_terminal("--help")
    assert "\033" not in in_terminal("--help", NO_COLOR="1")
    assert "\033" not in in_terminal("--help", TERM="dumb")


def test_colours_of_axes_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "batch=2/rows over cols rows"
    assert colours.painted(text, ["rows", "cols"]) == text
    monkeypatch.setattr(colours, "has_colours", lambda stream=None: True)
    assert colours.painted(text, ["rows", "cols"]) == "batch=2/\033[34mrows\033[0m over \033[33mcols\033[0m rows"
    assert colours.of_error("ShapeError") == "\033[1;31mShapeError\033[0m"
