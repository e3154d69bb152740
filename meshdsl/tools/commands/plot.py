"""`meshdsl plot`: the curves of one or more runs, as text and as an HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...errors import UsageError
from .common import OK, answer, command, out_file, reason_of, write


def add(commands: Any) -> None:
    """Add the subcommand and its options."""
    about = "plot the losses and other metrics of runs, from the files of `train --metrics`"
    parser = command(commands, "plot", run, about, workload=False)
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="a file of `train --metrics`, or a directory with one such file"
    )
    parser.add_argument("--html", type=out_file, metavar="FILE", help="write a self-contained HTML page with charts")


def run(options: argparse.Namespace) -> int:
    """Print the last figures of each run and a chart of the losses; write the page with --html."""
    from ...cost.report.curves import curves_of, curves_page
    from ...cost.report.tables import table

    runs = {name: curves_of(_lines(path)) for name, path in _named(options.runs).items()}
    if empty := [name for name, curves in runs.items() if not curves]:
        raise UsageError(f"{empty[0]} has no records of steps\n  give the file of `meshdsl train --metrics FILE`")
    if options.html:
        write(options.html, curves_page(runs))
    rows = [
        [name, metric, str(curve[-1][0]), f"{curve[-1][1]:.4g}", f"{min(value for _, value in curve):.4g}"]
        for name, curves in runs.items()
        for metric, curve in curves.items()
    ]
    text = f"{table(['run', 'metric', 'step', 'last', 'least'], rows, '<<>>>', indent=0)}\n\n{_chart(runs)}"
    answer(options, {"command": "plot", "runs": {name: dict(curves) for name, curves in runs.items()}}, text)
    return OK


def _named(paths: list[str]) -> dict[str, Path]:
    """The metrics file of each run, by a name: that of the file or its folder, made unique by its path."""
    files = [_file(Path(path)) for path in paths]
    names = [file.stem for file in files]
    if len(set(names)) < len(names):
        names = [str(file) for file in files]
    return dict(zip(names, files, strict=True))


def _file(path: Path) -> Path:
    try:
        if path.is_dir():
            files = sorted(path.glob("*.jsonl"))
            if len(files) != 1:
                raise UsageError(f"{path} has {len(files)} files that end in .jsonl; name one of them")
            return files[0]
    except (OSError, ValueError) as error:
        raise UsageError(f"RUN cannot be read: {reason_of(error)}") from None
    return path


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"{str(path)[:200]!r} cannot be read: {reason_of(error)}") from None


def _chart(runs: dict[str, Any]) -> str:
    """A text chart of the losses of all runs over the steps that each has."""
    from ...train.report import chart

    width = 64
    curves = {name: curves.get("loss") or next(iter(curves.values())) for name, curves in runs.items()}
    last = max(curve[-1][0] for curve in curves.values())
    marks = "abcdefghijklmnopqrstuvwxyz"
    resampled = {}
    for n, curve in enumerate(curves.values()):
        values, i = [], 0
        for column in range(width):
            step = last * (column + 1) / width
            while i + 1 < len(curve) and curve[i + 1][0] <= step:
                i += 1
            values.append(curve[i][1])
        resampled[marks[n % 26]] = values
    legend = "\n".join(f"{marks[n % 26]}: {name}" for n, name in enumerate(runs))
    return f"{chart(resampled, width=width)}\n       loss, steps 0 to {last}\n{legend}"
