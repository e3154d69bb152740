"""Dims that every reader needs whole are not sliced to be gathered again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.collectives import AllGather
from meshdsl.lowering.partition.whole_dims import whole_dims

CACHE = {kind: md.spec("batch:4 memory:64 heads:8 head:16") for kind in ("k", "v")}


def attend(x: md.Tensor, cache: Any, position: md.Tensor) -> Any:
    """One decoding step: write the key and value of one position, and read the cache."""
    mask = md.iota("memory:64") <= position
    return md.nn.cached_attention(x, cache, *md.dims("heads:8 head:16"), position=position, mask=mask)


@pytest.mark.parametrize("layout", ["batch:rows; memory:cols", "heads:cols; memory:rows", "memory:cols"])
def test_whole_dims_writes_one_position_of_a_split_cache_without_sending_it(layout: str) -> None:
    model = md.model(attend)
    args = md.spec("batch:4 model:32"), CACHE, md.spec("", "int32")
    program = md.compile(model, "rows:2 cols:4", layout).program(model.specs(*args), *args)
    assert not [str(r) for r in program.collectives if isinstance(r.op, AllGather)]


def test_whole_dims_splits_a_dim_that_only_one_of_two_readers_needs_whole() -> None:
    def both(cache: md.Tensor, x: md.Tensor, position: md.Tensor) -> Any:
        update = md.reshape(x, "memory:4 head:6")
        return md.dynamic_update_slice(cache, update * 2, "memory", position), update

    args = md.spec("memory:8 head:6"), md.spec("head:12 memory:2"), md.spec("", "int32")
    program = md.compile(both, "all:2", "memory:all").program(*args)
    assert program.outs[1].sharding.axes("memory") == ("all",)


def test_whole_dims_of_rows_do_not_include_the_scanned_dim() -> None:
    def stacked(x: md.Tensor) -> md.Tensor:
        rows = md.scan(lambda c, x: (c, x * 2), md.tensor(0.0), x, over="t")[1]
        return md.scan(lambda c, row: (c + row, row), md.tensor(np.zeros(4, np.float32), "b"), rows, over="t")[0]

    whole = whole_dims(md.compile(stacked, "all:2").graph(md.spec("t:3 b:4")))
    assert set().union(*whole.values()) == {"t"}
