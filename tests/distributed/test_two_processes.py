"""A mesh may span processes: two of four devices each compute what one of eight does."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import meshdsl as md
from meshdsl.train.weights.files import open_directory
from tests.together import free_port, run_together

from . import steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, np.ndarray]]:
    """The arrays that each process wrote."""
    port = str(free_port())
    files = [folder / f"{rank}.npz" for rank in range(2)]
    start = [sys.executable, "-m", "tests.distributed.steps", port]
    run_together([[*start, str(rank), str(file)] for rank, file in enumerate(files)], seconds=240)
    loaded = []
    for file in files:
        with np.load(file) as archive:
            loaded.append(dict(archive))
    return loaded


@pytest.mark.parametrize("layout", steps.LAYOUTS)
def test_two_processes_blocks_are_bitwise_equal_to_one_process(results: list[dict[str, np.ndarray]], layout: str):
    one = steps.run(layout)
    for name, tensor in one.items():
        whole = np.asarray(tensor.stored)
        blocks = {
            key: block for found in results for key, block in found.items() if key.startswith(f"{layout}@{name}@")
        }
        assert len(blocks) == 8, "one on each device of each process"
        for key, block in blocks.items():
            begin = [int(n) for n in key.rpartition("@")[2].split(",") if n]
            there = whole[tuple(slice(b, b + n) for b, n in zip(begin, block.shape, strict=True))]
            real = tuple(slice(0, max(0, d.size - b)) for d, b in zip(tensor.dims, begin, strict=True))
            assert np.array_equal(block[real], there[real]), (name, begin)


def test_two_processes_share_the_blocks(results: list[dict[str, np.ndarray]]):
    begins = [
        {key.rpartition("@")[2] for key in found if key.startswith(f"{steps.LAYOUTS[3]}@w@")} for found in results
    ]
    assert [len(b) for b in begins] == [4, 4]
    assert begins[0].isdisjoint(begins[1])


def test_two_processes_training_losses_equal_one_process(results: list[dict[str, np.ndarray]]):
    assert np.array_equal(results[0]["losses"], results[1]["losses"]), "every process sees the same numbers"
    np.testing.assert_allclose(results[0]["losses"], steps.train(), rtol=2e-6)


def test_two_processes_read_their_own_experts_and_write_the_same_directory(
    results: list[dict[str, np.ndarray]], folder: Path
):
    for rank, found in enumerate(results):
        experts = {name.split("experts.")[1][0] for name in found["read"] if "experts." in name}
        assert experts == {str(2 * rank), str(2 * rank + 1)}
    written, original = open_directory(folder / "exported"), open_directory(steps.MIXTRAL)
    assert written.keys() == original.keys()
    assert all(np.array_equal(entry.view(), original[name].view()) for name, entry in written.items())
    _, params = md.import_hugging_face(steps.MIXTRAL, steps.mixtral)
    for key, block in (
        (key, block) for found in results for key, block in found.items() if key.startswith("imported@")
    ):
        _, path, _, start = key.split("@")
        at = [int(n) for n in start.split(",") if n]
        there = params[path].numpy()[tuple(slice(a, a + n) for a, n in zip(at, block.shape, strict=True))]
        assert np.array_equal(block[tuple(map(slice, there.shape))], there), key
