"""Random command lines and model files: `python -m tests.cli.fuzz [--cases N] [--seed N]`; the last line is JSON.

Each case runs in this process, in a folder of its own. It must end with an exit code of the documented ones, without a
traceback and without `InternalError`; a failure says something on stderr, and a usage error has one line of usage or
an `UsageError`. With `--json`, every line of stdout is a JSON object. A model file that raises, exits, prints or does
not parse never gives 0 where no result was printed. A case that fails is printed with its seed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshdsl.tools import cli

HERE = Path(__file__).parent
GOOD = [f"{HERE / 'workloads.py'}:bigram", f"{HERE.parent / 'train' / 'tiny.py'}:tiny"]
ODD = [f"{HERE / 'workloads.py'}:{name}" for name in ("bigrams", "not_a_workload", "", "a b")]
ODD += [f"{HERE / 'workloads_odd.py'}:nothing", "x" * 300 + ".py:lm", "/dev/null.py:x", "\0.py:lm", ".py:lm", ":", ""]
ODD += ["nothing.py", "dir.py:lm", "\N{LATIN SMALL LETTER E WITH ACUTE}.py:lm", "a\nb.py:lm", "-", "x.py:lm:lm"]

# Bodies of model files that go wrong; `{step}` is a function that the commands call.
BODIES = {
    "raises": "raise ValueError('no data')",
    "raises_nothing": "raise ValueError",
    "exits": "import sys\nsys.exit(0)",
    "exits_with_text": "raise SystemExit('done')",
    "base_exception": "class Odd(BaseException): pass\nraise Odd('x')",
    "bad_text": "class Odd(Exception):\n    def __str__(self): raise KeyError('x')\nraise Odd",
    "prints": "print('{\"not\": a record')\nimport sys\nprint('to stderr', file=sys.stderr)",
    "does_not_parse": "def f(:\n",
    "does_not_parse_either": "x = '\n",
    "bad_indent": "  x = 1\n y = 2",
    "bytes": "\udcff\udcfe",
    "null": "x = 1\0",
    "escapes": "raise ValueError('\\x1b]0;owned\\x07')",
    "recursion": "def f(): return f()\nf()",
    "imports_nothing": "import nothing_of_this_name",
    "empty": "",
    "exit_in_import": "import os, sys\nsys.stdout.flush()\nraise KeyError",
}
PLACES = ("model", "inputs", "loss", "optimizer", "data")
COMMANDS = [
    "analyze",
    "compare",
    "explain",
    "train",
    "verify",
    "doctor",
    "export",
    "list",
    "scale",
]
COMMANDS += ["trian", "anlyze", "", "--", "-h", "--help", "--version", "help", "x" * 300, "\N{SNOWMAN}", "\udcff"]
OPTIONS = [
    *("--layout", "--mesh", "--set", "--machine", "--memory", "--place", "--steps", "--seed"),
    *("--devices", "--eval-every", "--eval-batches", "--save-every", "--keep", "--resume", "--log-every", "--config"),
    *("--checkpoints", "--metrics", "--html", "--trace", "--dim", "--collective", "--window", "--overlap"),
    *("--weight-update", "--non-finite", "--process", "--processes", "--coordinator", "--plans"),
    *("--json", "--forward", "--moves", "--graph", "--program", "--print-config", "--dry-run", "--take-over"),
    *("--jsn", "--stpes", "-x", "---", "--layuot", "--set=", "--no-such-option=3", "--params-only", "--out"),
    *("--plan", "--remat", "--microbatches", "--regather", "--update-group", "--tokens", "--price", "--axis", "--to"),
]
VALUES = [
    *("0", "1", "2", "-1", "10" + "0" * 19, "9" * 5000, "1e400", "nan", "inf", "-0", "+1", "0x10", "1_0", " 1", ""),
    *("\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT THREE}", "\N{CIRCLED DIGIT ONE}", "\udcff", "\0", "x" * 300),
    *("rows:2", "rows:2;cols:4", "all:8", "all:99999999999999999999", "all:0", "all:-1", "\N{SNOWMAN}:2", "a:2 a:2"),
    *("batch:rows", "batch:all", "data", "grid", "bach:rows", "width=4", "width=-4", "learning_rate=-1", "width=x"),
    *(
        "learning_rate=nan",
        "batch=0",
        "batch=99999999999999",
        "=",
        "=3",
        "width",
        "width=4=5",
        "a.b.c=1",
        "train.steps=1",
    ),
    *("16GB", "-16GB", "0", "cpu", "tpu-v5e", "nope", "x.toml", "/", ".", "..", "/dev/null", "/nowhere/x", "a/b/c"),
    *("model.py:1", "heads", "auto", "never", "none", "halves", "rows=x", "rows=node:2,gpu:4", "localhost:1", ":::"),
]


_LAYOUTS = ["", "--layout data", "--layout grid", "--layout batch:all --mesh all:2", "--layout width:a --mesh a:3"]
PLAUSIBLE = {
    "analyze": [*_LAYOUTS, "--layout data --memory 1kB", "--layout data --machine tpu-v4 --html x.html --trace x.json"],
    "compare": [*_LAYOUTS, "--layout data --layout grid --html x.html"],
    "explain": [
        *_LAYOUTS,
        "--layout grid --dim vocab",
        "--layout grid --moves",
        "--graph",
        "--layout data --collective 1",
    ],
    "verify": _LAYOUTS,
    "train": [
        *_LAYOUTS,
        "--layout data --steps 3",
        "--checkpoints x --keep 2",
        "--weight-update sharded --layout data",
    ],
}


def model_file(draw: random.Random) -> tuple[str, str]:
    """The text of a model file, with something wrong at its top or in one of its functions, and what it is."""
    kind, place = draw.choice(list(BODIES)), draw.choice(["top", *PLACES])
    body = BODIES[kind]
    if place == "top":
        return body + "\nlm = 3\n", f"{kind} at the top"
    source = (HERE / "workloads.py").read_text()
    inner = "\n".join("        " + line for line in body.splitlines()) or "        pass"
    odd = f"\n\ndef odd(real):\n    def called(*args):\n{inner}\n        return real(*args)\n    return called\n"
    data = "lambda c, seed: lambda split, step: {}" if place == "data" else f"bigram.{place}"
    return (
        f"import dataclasses\n{source}{odd}\nlm = dataclasses.replace(bigram, {place}=odd({data}))\n",
        f"{kind} in {place}",
    )


def arguments(draw: random.Random, workload: str) -> list[str]:
    """A command line: mostly one of the commands, with options that fit or do not."""
    command = draw.choice(COMMANDS[:5] if draw.random() < 0.8 else COMMANDS)
    words = [command] if draw.random() < 0.98 else []
    words += [workload] if draw.random() < 0.95 else []
    if draw.random() < 0.6:
        words += draw.choice(PLAUSIBLE.get(command, [""])).split()
    for _ in range(draw.choice([0, 0, 0, 0, 1, 1, 2, 3])):
        option, value = draw.choice(OPTIONS), draw.choice(VALUES)
        words += draw.choice([[option, value], [f"{option}={value}"], [option]])
    if draw.random() < 0.3:
        words.append("--json")
    if command == "train":  # what would run for long, or start processes, is only checked
        words.append(draw.choice(["--dry-run", "--print-config", "--print-config"]))
    if command == "search":
        words += ["--plans", "1"]
    if draw.random() < 0.05:
        draw.shuffle(words)
    return words


def run(words: list[str]) -> tuple[int, str, str]:
    """The exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(words)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
    return code, out.getvalue(), err.getvalue()


def problem(words: list[str], code: Any, out: str, err: str) -> str | None:
    """The problem of an answer; None if it is right."""
    if code not in (0, 1, 2, 3, 4, 5, 75, 130):
        return f"exit code {code!r}"
    if "Traceback" in err or "Traceback" in out:
        return "a traceback"
    if "InternalError" in err:
        return "an internal error"
    if code and not err.strip() and not out.strip():
        return "an error that says nothing"
    if code == 0 and not out:
        return "a success that printed nothing"
    if "usage: " not in err and any(c != "\n" and ord(c) < 32 for c in err):
        return "control characters"
    if code == 2 and not ("usage: " in err or "UsageError" in err):
        return "a usage error that does not say so"
    if err.count("usage: ") > 1:
        return "two lines of usage"
    if "--json" in words and code == 0 and not {"-h", "--help", "--version"} & set(words):
        try:
            if not all(isinstance(json.loads(line), dict) for line in out.splitlines()):
                return "a line that is no JSON object"
        except ValueError:
            return "a line that is no JSON"
    return None


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    before = os.getcwd(), list(sys.path)
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        try:
            (Path(name) / "dir.py").mkdir()
            yield Path(name)
        finally:
            os.chdir(before[0])
            sys.path[:] = before[1]


def fuzz(cases: int, seed: int) -> dict[str, Any]:
    """Run so many cases; counts by exit code, and the failures."""
    codes: dict[int, int] = {}
    failures: list[str] = []
    slowest = 0.0
    for n in range(cases):
        draw = random.Random(f"{seed} {n}")
        with _folder() as folder:
            workload, what = draw.choice([*GOOD, *GOOD, *ODD]), "a file of ours"
            if draw.random() < 0.4:
                text, what = model_file(draw)
                (folder / "odd.py").write_bytes(text.encode("utf-8", "surrogateescape"))
                workload = "odd.py:lm"
            words = arguments(draw, workload)
            began = time.process_time()
            try:
                code, out, err = run(words)
                wrong = problem(words, code, out, err)
            except BaseException as error:
                code, out, err, wrong = -1, "", "", f"raised {type(error).__name__}: {error}"
            slowest = max(slowest, time.process_time() - began)
            codes[code] = codes.get(code, 0) + 1
            if wrong is not None:
                failures.append(f"case {n} of seed {seed}: {wrong}: {words!r}, {what}\n{err[-600:]}")
    return {"cases": cases, "failed": len(failures), "codes": codes, "slowest": round(slowest, 2), "failures": failures}


def main() -> int:
    parser = argparse.ArgumentParser(description="random command lines and model files")
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    found = fuzz(options.cases, options.seed)
    for failure in found.pop("failures"):
        print(failure, file=sys.stderr)
    print(json.dumps({"seed": options.seed, **found}))
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
