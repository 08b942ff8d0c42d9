"""Roots of collectives: a global rank or an index in the group."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_coll import GroupError, check


class Members:
    ranks = (4, 2, 7)
    size = 3
    name = "G"
    closed = False


@pytest.mark.parametrize(
    ("rank", "group_rank", "index"), [(7, None, 2), (np.int64(2), None, 1), (None, np.int32(0), 0)]
)
def test_root(rank, group_rank, index):
    assert check.root("broadcast", Members(), "src", rank, group_rank) == index


@pytest.mark.parametrize(
    ("rank", "group_rank", "words"),
    [
        (0, None, "src must be a global rank"),
        (2.0, None, "got 2.0"),
        (True, None, "got True"),
        (None, None, "got None"),
        (None, 3, "group_src must be an index from 0 to 2"),
        (None, -1, "got -1"),
        (4, 0, "expected one of them"),
    ],
)
def test_what_is_no_root(rank, group_rank, words):
    with pytest.raises(GroupError, match=f"^broadcast: .*{words}"):
        check.root("broadcast", Members(), "src", rank, group_rank)


def test_the_default_gives_way():
    assert check.root("broadcast", Members(), "src", check.DEFAULT_ROOT, 1) == 1
    with pytest.raises(GroupError, match="got 0"):
        check.root("broadcast", Members(), "src", check.DEFAULT_ROOT, None)
