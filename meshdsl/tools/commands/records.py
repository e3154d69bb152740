"""Prints the records of `meshdsl train` as text or JSON lines, and opens the files that store them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ...cost.report.schema import SCHEMA_VERSION
from ...errors.units import show_bytes
from .common import discard_output, print_json, printable


def sinks(options: argparse.Namespace, is_first: bool, report: Callable[[str], object]) -> list[Any]:
    """The writers of metrics, for process 0, and of a profile, for every process."""
    import jax

    from .metrics import Lines, Profile, TensorBoard, Wandb

    kinds = {"metrics": partial(Lines, header={"schema_version": SCHEMA_VERSION})}
    kinds |= {"tensorboard": TensorBoard, "wandb": Wandb}
    given = {name: path for name in kinds if is_first and (path := getattr(options, name)) is not None}
    writers: list[Any] = [kinds[name](path) for name, path in given.items()]
    if options.profile is not None:
        multi_process = jax.process_count() > 1  # on one host, processes would write the same file
        folder = options.profile / f"process-{jax.process_index()}" if multi_process else options.profile
        writers.append(Profile(folder, say=report))
    return writers


class StdoutWriter:
    """Prints records on stdout, one step in `every`, and the progress on stderr; `goes_on` if nobody reads them."""

    def __init__(self, options: argparse.Namespace, progress: Any, steps: int, goes_on: bool):
        self.json, self.progress, self.steps, self.goes_on = options.json, progress, steps, goes_on
        self.every = options.log_every or (1 if options.json else max(1, steps // 20))

    def write(self, record: Mapping[str, Any]) -> None:
        """Print a record; step records only if due, first, last or skipped."""
        if record["event"] == "step":
            step, loss = record["step"], record["loss"]
            self.progress.update(step, ("skipped" if loss is None else f"loss {loss:.4f}") + _use(record))
            if step % self.every and step not in (1, self.steps) and not record.get("skipped"):
                return
        self.progress.clear()
        try:
            if self.json:
                print_json({"command": "train", **record})
            elif record["event"] != "save":
                print(printable(_LINES.get(record["event"], _end_line)(record)), flush=True)
        except OSError:
            if not self.goes_on:
                raise
            discard_output()
        if record["event"] == "start" and self.steps:
            self.progress.note("compiling the step")

    def close(self) -> None:
        """Erase the progress bar."""
        self.progress.clear()


def _step_line(record: Mapping[str, Any]) -> str:
    loss = "not finite, skipped" if record["loss"] is None else f"{record['loss']:.4f}"
    loss += ", skipped" if record.get("skipped") and record["loss"] is not None else ""
    rate = f"  {record['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in record else ""
    rate += _use(record)
    left = f"  {_clock(record['seconds_left'])} left" if record.get("seconds_left", 0) >= 1 else ""
    compiled = f"  compiled in {record['compile_seconds']:.1f} s" if "compile_seconds" in record else ""
    return f"step {record['step']:>6}  loss {loss}  {_milliseconds(record['seconds'])}{rate}{left}{compiled}"


def _eval_line(record: Mapping[str, Any]) -> str:
    bits = f", {record['bits_per_byte']:.4f} bits per byte" if record.get("bits_per_byte") is not None else ""
    loss = "not finite" if record["loss"] is None else f"{record['loss']:.4f}"
    means = f" (means over batches: {', '.join(record['averaged'])})" if record.get("averaged") else ""
    return f"step {record['step']:>6}  eval loss {loss}{bits}{means}"


def _start_line(record: Mapping[str, Any]) -> str:
    place = f"mesh {record['mesh']}" if record["mesh"] else "one device"
    split = f"layout {record['layout']}" if record["layout"] else "replicated"
    return (
        f"{record['workload']}: {record['parameters']:,} parameters on {place}, {split}\ndata: {_data(record['data'])}"
    )


def _resume_line(record: Mapping[str, Any]) -> str:
    changed = "".join(f"\n  {line}" for line in record["changed"])
    done = "" if record["steps_left"] else "; all steps are already done"
    return f"step {record['step']:>6}  resumed from {record['from']}{done}{changed}"


def _end_line(record: Mapping[str, Any]) -> str:
    rate = f"; {record['bytes_per_second']:,.0f} bytes/s" if "bytes_per_second" in record else ""
    rate += f"; {record['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in record else ""
    skipped = f"; {record['skipped']} skipped" if "skipped" in record else ""
    return f"{record['steps']} steps in {record['seconds']:.1f} s{rate}{skipped}"


_LINES = {"step": _step_line, "eval": _eval_line, "start": _start_line, "resume": _resume_line}


def _use(record: Mapping[str, Any]) -> str:
    """Utilisation and memory, where they are known."""
    mfu = f"  MFU {record['mfu']:.1%}" if "mfu" in record else ""
    return mfu + (f"  {show_bytes(record['peak_bytes'])}" if "peak_bytes" in record else "")


def _milliseconds(seconds: float) -> str:
    """A time in milliseconds with three digits.

    >>> _milliseconds(0.000123), _milliseconds(0.0123), _milliseconds(95.3671)
    ('0.123 ms', '12.3 ms', '95367 ms')
    """
    ms = max(seconds * 1e3, 1e-3)
    return f"{ms:.3f} ms" if ms < 1 else f"{ms:.2f} ms" if ms < 10 else f"{ms:.1f} ms" if ms < 100 else f"{ms:.0f} ms"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def _data(data: Mapping[str, Any]) -> str:
    if data["kind"] == "text":
        size, held_out = data["bytes"], sum(kind["bytes"] for kind in data["held_out"].values())
        return (
            f"{show_bytes(size)} of the Python standard library's own text, {show_bytes(held_out)} of it held out for "
            f"eval (sha256 {data['sha256'][:16]})"
        )
    kinds: dict[str, str] = {"noise": "random numbers, because the inputs are not text", "given": "from the workload"}
    return kinds.get(data["kind"], str(data["kind"]))
