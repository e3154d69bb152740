"""Public names under a type checker: mistakes in a user's file, and the types that an editor shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests import stub
from tests.test_imports import ROOT

START = 'import meshdsl as md\n\nx = md.tensor([1.0], "a")\n'

# One mistake a line, and a part of pyright's message
MISTAKES = {
    "md.einsm(1)": "einsm",
    "md.nn.linera(x)": "linera",
    "md.Layout(3)": "rules",
    'md.compile(3, "rows:2")': '"f"',
    'md.compile(lambda x: x, "rows:2", weight_updates="sharded")': "weight_updates",
    'md.Dim("a", "b")': "size",
    "md.sum(x, over=3)": "over",
    "x.dim": "dim",
    'md.optim.adamw("0.1")': "learning_rate",
    'md.random.normal(0, "a:3")': "key",
}
TYPES = {
    'md.einsum(x, x, out="a")': "Tensor",
    "md.exp(x) + 1": "Tensor",
    "x.dims": "Dims",
    "md.sum(x) < 0": "Tensor",
    'md.compile(lambda x: x, "rows:2")': "Compiled",
    'md.compile(lambda x: x, "rows:2").cost(x)': "Report",
    "md.optim.adamw(0.1)": "Optimizer",
    "md.nn.layer_norm(x)": "Tensor",
    "md.random.key(0)": "Tensor",
    "md.model(md.exp)": "Model",
}


def checked(lines: list[str], folder: Path) -> list[tuple[str, str]]:
    """Pyright's messages for these lines of a user's file, each with its line."""
    text = START + "\n".join(lines) + "\n"
    (folder / "user.py").write_text(text)
    (folder / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "user.py"]
    out = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    found = json.loads(out.stdout)["generalDiagnostics"]
    return [(text.splitlines()[d["range"]["start"]["line"]], d["message"]) for d in found]


def test_stub_lists_the_public_names() -> None:
    assert stub.STUB.read_text(encoding="utf-8") == stub.text(), "run: python -m tests.stub"


def test_pyright_finds_every_mistake_and_knows_every_type(tmp_path: Path) -> None:
    shown = [f"reveal_type({expression})" for expression in TYPES]
    messages = checked([*MISTAKES, *shown], tmp_path)
    assert [line for line, _ in messages] == [*MISTAKES, *shown]
    for (_, message), part in zip(messages, [*MISTAKES.values(), *TYPES.values()], strict=True):
        assert part in message, message
