"""Links in a checkpoint directory are reported, and nothing outside the directory is read, changed or removed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import meshdsl as md
from meshdsl.train.checkpoint.files import open_root, remove_tree

from .links import TREE, content, outside, random_links, saved


@pytest.mark.parametrize("name", ["step-00000001.abcd.unfinished", "step-00000001.abcd.removed"])
def test_save_leaves_a_linked_unfinished_step(tmp_path: Path, name: str):
    there = outside(tmp_path / "outside")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(there)
    said = saved(tmp_path / "run", 2)
    assert len(content(there)) == 2 and (tmp_path / "run" / name).is_symlink()
    assert said == [f"{name} in {tmp_path / 'run'} is a link; it is neither read nor removed"]


def test_retention_and_discard_leave_a_step_that_was_moved_and_linked(tmp_path: Path):
    run, bulk = tmp_path / "run", tmp_path / "bulk"
    saved(run, 2)
    (run / "step-00000001").rename(bulk)
    (run / "step-00000001").symlink_to(bulk)
    before = content(bulk)
    assert any("step-00000001" in line and "is a link" in line for line in saved(run, 3, keep=1))
    assert content(bulk) == before and (run / "step-00000001").is_symlink()
    checkpoints = md.Checkpoints(run, report=lambda line: None)
    assert checkpoints.restore().step == 5
    with pytest.raises(md.CheckpointError, match="it is a link; links are not followed"):
        checkpoints.restore(1)
    with pytest.raises(md.SaveError, match=r"step-00000001 in .* is a link\n  remove the link first"):
        checkpoints.discard(after=0)
    assert content(bulk) == before and checkpoints.steps() == [1, 5]


def test_save_refuses_a_later_step_that_is_a_link(tmp_path: Path):
    there = outside(tmp_path / "outside")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-00000009").symlink_to(there)
    checkpoints = md.Checkpoints(tmp_path / "run", report=lambda line: None)
    with pytest.raises(md.SaveError, match=r"step-00000009 in .* is a link\n  remove the link"):
        checkpoints.save(3, TREE)
    checkpoints.close()
    assert len(content(there)) == 2


def test_remove_tree_removes_links_inside_and_never_follows(tmp_path: Path):
    there, tree = outside(tmp_path / "outside"), tmp_path / "tree"
    tree.mkdir()
    (tree / "folder").symlink_to(there)
    (tree / "file").symlink_to(there / "part-00000.bin")
    (tree / "own").mkdir()
    (tree / "own" / "up").symlink_to("..")
    with open_root(tmp_path) as root:
        remove_tree("tree", root)
        (tmp_path / "link").symlink_to(there)
        with pytest.raises(md.SaveError, match="link is a link"):
            remove_tree("link", root)
    assert not tree.exists() and len(content(there)) == 2


def test_nothing_outside_changes_whatever_is_a_link(tmp_path: Path):
    draw = random.Random(0)
    for case in range(10):
        random_links(tmp_path / str(case), draw)
