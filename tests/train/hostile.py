"""Hostile configurations and command lines: mutations of honest ones, run in this process.

Each ends with one of the exit codes, in under two seconds of processor time, with no traceback, with memory within
twice the honest size of its file, and without running a program, opening a socket or removing a file.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

SECONDS, ALLOWANCE = 2.0, 16 << 20
WORKLOAD = str(Path(__file__).parent / "tiny.py") + ":tiny"
VALUES = [
    *("0", "-1", "1", "1e400", "nan", "-inf", "9" * 5000, "0x10", "true", '"none"', '""', "[]", "[[[]]]", "{}", "''"),
    *("{a = 1, b = {c = 2}}", '"\\u0000"', '"' + "x" * 10_000 + '"', "1979-05-27T07:32:00Z", "18446744073709551616"),
    *("[1, 'a', 2.5]", '"../../etc/passwd"', '"$(touch /tmp/owned)"', "\"__import__('os')\"", "[" * 3000, "2.0", "1_0"),
]
KEYS = [
    *("train.steps", "train.seed", "train.non_finite", "train.max_skips", "train.weight_update", "checkpoints.keep"),
    *("checkpoints.save_every", "checkpoints.resume", "checkpoints.directory", "config.batch", "config.io", "mesh"),
    *("config.drop.keep", "config.drop", "config", "train", "layout", "workload", "trian.steps", "config.hiden", ""),
    *(
        "config.__class__",
        "train.__init__.__globals__",
        "a.b.c.d",
        ".",
        "..",
        "train.",
        '"a b".c',
        "config.drop.keep.x",
    ),
]
TEXTS = [
    "",
    "\0",
    "\x7f",
    "é",
    "\udcff",
    "a:b",
    "rows:2;cols:4",
    "rows:999999999999",
    "all:0",
    "all:-1",
    "auto",
    "x" * 9999,
]
OPTIONS = [
    *("--set", "--mesh", "--layout", "--steps", "--seed", "--devices", "--save-every", "--keep"),
    *("--resume", "--eval-every", "--eval-batches", "--weight-update", "--non-finite", "--log-every", "--machine"),
    *("--config", "--checkpoints", "--coordinator", "--process", "--processes", "--unknown", "-x", "--"),
]
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "os.remove", "os.rename")


class Watch:
    """The audit events of Python that must not happen."""

    def __init__(self) -> None:
        self.on, self.seen = False, list[str]()
        sys.addaudithook(lambda event, args: self.seen.append(event) if self.on and event in FORBIDDEN else None)


def document(draw: random.Random, honest: str) -> bytes:
    """A TOML file with something wrong in it."""
    lines = honest.splitlines()
    for _ in range(draw.choice([1, 1, 2, 4])):
        n = draw.randrange(len(lines))
        kind = draw.randrange(8)
        if kind == 0:
            lines[n] = lines[n].partition("=")[0] + "= " + draw.choice(VALUES)
        elif kind == 1:
            lines.insert(n, f"{draw.choice(KEYS)} = {draw.choice(VALUES)}")
        elif kind == 2:
            lines.insert(n, lines[draw.randrange(len(lines))])
        elif kind == 3 and len(lines) > 1:
            del lines[n]
        elif kind == 4:
            lines.insert(n, f"[{draw.choice(KEYS)}]")
        elif kind == 5:
            draw.shuffle(lines)
        elif kind == 6:
            lines[n] = lines[n][: draw.randrange(len(lines[n]) + 1)]
        else:
            lines[n] = draw.choice(TEXTS) + lines[n]
    raw = bytearray("\n".join(lines).encode("utf-8", "surrogateescape"))
    if draw.random() < 0.15 and raw:
        for _ in range(draw.choice([1, 3, 20])):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
    if draw.random() < 0.01:
        raw += b"# " + b"x" * draw.choice([900_000, 3_000_000])
    return bytes(raw)


def words(draw: random.Random) -> list[str]:
    """Options and settings, many of them wrong."""
    found: list[str] = []
    for _ in range(draw.randrange(4)):
        option = draw.choice(OPTIONS)
        value = draw.choice([*TEXTS, *VALUES, *KEYS])
        if option == "--set":
            value = draw.choice([f"{draw.choice(KEYS)}={draw.choice([*VALUES, *TEXTS])}", value])
        found += draw.choice([[option, value], [f"{option}={value}"], [option]])
    return found


def run(arguments: list[str]) -> tuple[int, str]:
    """The exit code and what was said on stderr."""
    from meshdsl.tools import cli

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(arguments)
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, err.getvalue()


def hostile(count: int, seed: int, until: float = float("inf"), dry_runs: int = 60) -> dict[str, Any]:
    """So many mutations; the first `dry_runs` trace and cost the step as well. Raises on any misbehaviour."""
    from meshdsl.train import resolve

    run(["list", "nothing"])  # imports all models, which may write their bytecode
    draw, watch, honest = random.Random(seed), Watch(), str(resolve(WORKLOAD))
    codes: dict[int, int] = {}
    slowest, largest = 0.0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        for n in range(count):
            if time.monotonic() > until:
                break
            body = document(draw, honest)
            file.write_bytes(body)
            workload = WORKLOAD if draw.random() < 0.95 else draw.choice([*TEXTS, *KEYS])
            mode = "--dry-run" if n < dry_runs else "--print-config"
            config = ["--config", str(file)] if draw.random() < 0.7 else []
            arguments = ["train", workload, *config, *words(draw), mode]
            weighed = mode == "--print-config" and n % 5 == 0
            if weighed:
                tracemalloc.start()
            began = time.process_time()
            watch.on = True
            try:
                code, said = run(arguments)
                peak = tracemalloc.get_traced_memory()[1] if weighed else 0
            except BaseException:
                print(f"case {n} of seed {seed}: {arguments!r}\n{body!r}", file=sys.stderr)
                raise
            finally:
                watch.on = False
                tracemalloc.stop()
            seconds = (time.process_time() - began) / (4 if weighed else 1)  # weighing makes it slower
            case = f"case {n} of seed {seed}: {arguments!r}"
            assert code in (0, 1, 2, 3, 4) and "Traceback" not in said, (case, code, said)
            assert not code or said, (case, "an error that says nothing")
            assert seconds < SECONDS or mode == "--dry-run", (case, seconds)
            assert peak < 2 * len(body) + ALLOWANCE, (case, peak)
            assert not watch.seen, (case, watch.seen)
            codes[code] = codes.get(code, 0) + 1
            slowest, largest = max(slowest, seconds), max(largest, peak)
    return {
        "mutations": sum(codes.values()),
        "codes": codes,
        "slowest_seconds": round(slowest, 3),
        "largest_bytes": int(largest),
    }
