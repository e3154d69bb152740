"""Eight CPU devices and 64-bit types for every test; by default, runs draw the same examples, unless told to fuzz."""

from __future__ import annotations

import difflib
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # set before jax is imported; subprocesses of tests inherit it
# hundreds of processes import the package: the first one compiles its modules to bytecode for all of them
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Tests compile thousands of small programs and run each once or twice, so XLA compiles quickly instead of well: this
# takes a fifth of the CPU time of its defaults, which `make fuzz` uses.
QUICK_COMPILES = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # except in tests with the fixture `optimized`
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",  # a sixth of the time of lowering and compiling is for Python frames
    "XLA_FLAGS": (
        "--xla_backend_optimization_level=1 "
        "--xla_cpu_parallel_codegen_split_count=1"  # one LLVM module for each program
        # a fusion becomes LLVM code at once, without passes over MLIR; XLA aborts if it does not know a flag
        + (" --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else "")
    ),
}
QUICK = os.environ.get("HYPOTHESIS_PROFILE") != "fuzz"
if QUICK:
    for name, value in QUICK_COMPILES.items():
        os.environ.setdefault(name, value)
if find_spec("libtpu") is not None:  # the TPU compiler's estimates are those of optimized programs
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0"

import jax

# Programs that take long to compile, such as training steps, are compiled once. Each process has a folder of its own,
# because JAX does not write an entry at once: another process could read a part of it.
COMPILED = tempfile.TemporaryDirectory(prefix="meshdsl-tests-", ignore_cleanup_errors=True)
if QUICK:
    jax.config.update("jax_compilation_cache_dir", COMPILED.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)

import hypothesis
import numpy as np
import pytest
from jax.core import Tracer

from meshdsl import backend
from meshdsl.tools.compilers.aot import available
from meshdsl.trace import eager
from meshdsl.trace.arguments import on_device
from tests.sums import einsum_in_order

GOLDEN = Path(__file__).parent / "golden"

# JAX compiles on the first call of each shape, so one example's time is meaningless: no deadline
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None, max_examples=20)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/*.txt instead of comparing")
    parser.addoption("--sample", type=int, metavar="N", help="run N cases of each parametrized test, evenly spaced")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `--sample` asks to, and skip tests of the TPU compiler where it is missing."""
    if n := config.getoption("--sample"):
        kept = sampled((item.nodeid for item in items), n)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
        items[:] = [item for item in items if item.nodeid in kept]
    missing = available()
    for item in (item for item in items if item.get_closest_marker("aot")):
        if item.path.parent.name != "compilers":
            raise pytest.UsageError(f"{item.nodeid} is marked aot: move it to tests/compilers")
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))


def sampled(names: Iterable[str], n: int) -> set[str]:
    """`n` evenly spaced cases of each test (`test[case]`)."""
    cases: dict[str, list[str]] = {}
    for name in names:
        cases.setdefault(name.partition("[")[0], []).append(name)
    return {group[i * len(group) // n] for group in cases.values() for i in range(n)}


IN_JAX = eager._computed


def _at_once(op: Any, arrays: Sequence[Any], shapes: Any, types: Any, params: Any) -> Any:
    """As `eager._computed`, by the NumPy kernels where all operands are arrays and no parameter is a function."""
    if not arrays or any(isinstance(x, Tracer) for x in arrays) or any(map(callable, params.values())):
        return IN_JAX(op, arrays, shapes, types, params)
    results = eager.run_kernel(op, backend.NumPy, list(map(np.asarray, arrays)), shapes, types, params)
    return [on_device(np.asarray(x, t.dtype)) for x, t in zip(results, types, strict=True)]


def pytest_configure() -> None:
    """Operations outside a trace run in NumPy, without a compiled program for each.

    `test_numpy_and_eager_jax_agree` compares every operation with what users run; see the fixture `at_once_in_jax`.
    """
    if QUICK:
        eager._computed = _at_once


def pytest_unconfigure() -> None:
    COMPILED.cleanup()  # workers end without their finalizers


def pytest_collection_finish() -> None:
    """Collect garbage seldom, and never again what is alive now: modules and tests stay until the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000_000, 20, 20)


@contextmanager
def optimizing() -> Iterator[None]:
    """XLA optimises what is compiled inside: for tests that run one program many times, or measure."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def optimized() -> Iterator[None]:
    with optimizing():
        yield


@pytest.fixture
def at_once_in_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations outside a trace run as users run them."""
    monkeypatch.setattr(eager, "_computed", IN_JAX)


@pytest.fixture
def fixed_order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator adds the terms of a product one after another."""
    monkeypatch.setattr(backend.NumPy, "einsum", staticmethod(einsum_in_order))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` fails unless `text` equals tests/golden/<name>.txt, up to the final newline."""
    update = bool(request.config.getoption("--update-golden"))

    def check(name: str, text: str) -> None:
        __tracebackhide__ = True
        problem = compare_golden(GOLDEN / f"{name}.txt", text, update=update)
        if problem is not None:
            pytest.fail(problem, pytrace=False)

    return check


def compare_golden(path: Path, text: str, *, update: bool) -> str | None:
    """The difference between `text` and the file, or None; with `update`, write the file and return None."""
    text = text.rstrip("\n") + "\n"
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return None
    way_out = "if this is wanted: make test ARGS=--update-golden, then read the diff"
    if not path.exists():
        return f"no golden file {path.name}; it would hold\n\n{text}\n{way_out}"
    wanted = path.read_text(encoding="utf-8")
    if text == wanted:
        return None
    diff = difflib.unified_diff(wanted.splitlines(), text.splitlines(), path.name, "this run", lineterm="")
    return "\n".join([*diff, "", way_out])
