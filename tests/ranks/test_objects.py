"""Python objects: broadcast_object_list, gather_jagged_object_lists, all_reduce_dict."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributed import ReduceOp

import cupy_coll as cc

RANK_OF_THIS_PROCESS = [0]


class BreaksWhenUnpickled:
    """Unpickling raises on one global rank, or on all."""

    def __init__(self, rank: int | None = None) -> None:
        self.rank = rank

    def __reduce__(self):
        return unpickle_badly, (self.rank,)


def unpickle_badly(rank):
    if rank is None or rank == RANK_OF_THIS_PROCESS[0]:
        raise RuntimeError("no way back")
    return "fine here"


@pytest.fixture(autouse=True)
def know_the_rank(rank):
    RANK_OF_THIS_PROCESS[0] = rank


def outside(ranks) -> str:
    return f"TEST_{'_'.join(map(str, ranks))}"


# ------------------------------------------------------------------------------------ broadcast_object_list


def test_broadcast_object_list(group_of, expect, rank):
    for ranks in group_of.several():
        group = group_of(ranks)
        for index, src in enumerate(ranks):
            mine = [{"rank": rank}, (rank, None), "text " * rank, rank]
            if group is None:
                expect(cc.broadcast_object_list(mine, outside(ranks), src=src), None)
                expect(mine[3], rank, "outside")
                continue
            root = {"src": src} if index % 2 else {"group_src": index}
            same_list = mine
            expect(cc.broadcast_object_list(mine, group, **root), None)
            right = [{"rank": src}, (src, None), "text " * src, src]
            expect(same_list, right, f"{ranks} from {src}")


def test_broadcast_of_large_arrays(world, rank, size, expect):
    """NumPy arrays and tensors of megabytes, of different layouts; what arrives can be written to."""
    root = size - 1
    array = np.arange(700_000.0).reshape(700, 1000)
    objects = [array, array.T, torch.arange(300_000), {"nested": [array[::2]]}, b"x" * 3_000_000, np.zeros(0)]
    mine = objects if rank == root else [None] * len(objects)
    cc.broadcast_object_list(mine, world, src=root)
    expect.that(np.array_equal(mine[0], array), "array")
    expect.that(np.array_equal(mine[1], array.T), "transposed array")
    expect.that(torch.equal(mine[2], torch.arange(300_000)), "tensor")
    expect.that(np.array_equal(mine[3]["nested"][0], array[::2]), "strided array")
    expect.that(mine[4] == b"x" * 3_000_000, "bytes")
    expect(mine[5].shape, (0,))
    expect(mine[0].flags.writeable, True, "writable")


def test_broadcast_of_an_empty_list(world, expect):
    nothing: list[object] = []
    cc.broadcast_object_list(nothing, world)
    expect(nothing, [])


def test_lists_of_unequal_length_raise_everywhere(world, rank, size, raises_everywhere):
    if size < 2:
        pytest.skip(f"needs 2 ranks, this run has {size}")
    with raises_everywhere(cc.MismatchError, rf"broadcast_object_list.*(rank )?{size - 1}"):
        cc.broadcast_object_list([None] * (3 if rank == size - 1 else 2), world)


def test_broadcast_of_a_non_list_raises_everywhere(world, rank, size, raises_everywhere):
    with raises_everywhere(cc.CupyCollError, "broadcast_object_list.*list"):
        cc.broadcast_object_list("text" if rank == size - 1 else ["text"], world)


def test_roots_that_differ_raise_everywhere(world, rank, size, raises_everywhere):
    if size < 2:
        pytest.skip(f"needs 2 ranks, this run has {size}")
    with raises_everywhere(cc.MismatchError, "broadcast_object_list"):
        cc.broadcast_object_list([1], world, src=int(rank == size - 1))


def test_a9_unpicklable_at_the_root(world, rank, size, raises_everywhere, expect):
    root = size - 1
    with raises_everywhere(cc.CupyCollError, f"broadcast_object_list.*rank {root}"):
        cc.broadcast_object_list([(lambda: 0) if rank == root else None], world, src=root)
    mine = [rank]
    cc.broadcast_object_list(mine, world, src=root)
    expect(mine, [root])


def test_a9_unpickling_raises_in_broadcast(world, rank, size, raises_everywhere, expect):
    with raises_everywhere(cc.CupyCollError, "broadcast_object_list.*no way back"):
        cc.broadcast_object_list([BreaksWhenUnpickled() if rank == 0 else None], world)
    if size > 1:
        with raises_everywhere(cc.CupyCollError, f"broadcast_object_list.*rank {size - 1}.*no way back"):
            cc.broadcast_object_list([BreaksWhenUnpickled(size - 1) if rank == 0 else None], world)
    mine = [rank]
    cc.broadcast_object_list(mine, world)
    expect(mine, [0])


# ------------------------------------------------------------------------------- gather_jagged_object_lists


def test_gather_jagged_object_lists(group_of, expect, rank):
    """The member at position i brings i objects: the first brings none."""
    for ranks in group_of.several():
        group = group_of(ranks)
        mine = [(rank, i) for i in range(ranks.index(rank) if rank in ranks else 0)]
        before = list(mine)
        if group is None:
            expect(cc.gather_jagged_object_lists(mine, outside(ranks)), None, f"{ranks}: outside")
            continue
        right = [(member, i) for index, member in enumerate(ranks) for i in range(index)]
        expect(cc.gather_jagged_object_lists(mine, group), right, str(ranks))
        expect(mine, before, "input changed")


def test_the_documented_example(group_of, expect):
    group = group_of.of(3)
    if group is None:
        return
    mine = [["o0", "o1"], ["o2", "o3", "o4"], ["o5"]][group.rank]
    expect(cc.gather_jagged_object_lists(mine, group=group), ["o0", "o1", "o2", "o3", "o4", "o5"])


def test_all_empty(world, expect):
    expect(cc.gather_jagged_object_lists([]), [])


def test_gather_of_large_arrays(world, rank, size, expect):
    """Different sizes on the ranks, out of band of the pickle; also read-only and tensors."""
    array = np.arange(200_000.0 * (rank + 1)) + rank
    frozen = np.full(50_000, rank, np.int16)
    frozen.flags.writeable = False
    got = cc.gather_jagged_object_lists([array, frozen, torch.full((30_000,), rank)])
    expect(len(got), 3 * size)
    for member in range(size):
        right = np.arange(200_000.0 * (member + 1)) + member
        expect.that(np.array_equal(got[3 * member], right), f"array of rank {member}")
        expect.that(np.array_equal(got[3 * member + 1], np.full(50_000, member, np.int16)), f"frozen of {member}")
        expect.that(torch.equal(got[3 * member + 2], torch.full((30_000,), member)), f"tensor of {member}")


def test_result_is_independent_of_the_input(world, rank, size, expect):
    """What comes from the rank itself is a copy as well: ranks see the same whatever anybody changes later."""
    mine = [[rank]]
    got = cc.gather_jagged_object_lists(mine)
    mine[0].append("later")
    expect(got, [[member] for member in range(size)])


def test_non_lists_raise_everywhere(world, rank, size, raises_everywhere):
    for bad in ("text", ("a", "tuple"), None, 3, {"a": 1}, np.zeros(3), (x for x in "ab")):
        with raises_everywhere(cc.CupyCollError, "gather_jagged_object_lists.*list"):
            cc.gather_jagged_object_lists(bad if rank == size - 1 else ["right"])
    with raises_everywhere(cc.ArgumentError, "gather_jagged_object_lists.*local_objects.*str"):
        cc.gather_jagged_object_lists("text")


def test_a9_unpicklable_on_one_rank(world, rank, size, raises_everywhere, expect):
    odd = min(1, size - 1)
    with raises_everywhere(cc.CupyCollError, f"gather_jagged_object_lists.*rank {odd}"):
        cc.gather_jagged_object_lists([lambda: 0] if rank == odd else [1])
    expect(cc.gather_jagged_object_lists([rank]), list(range(size)))


def test_a9_unpickling_raises_in_gather(world, rank, size, raises_everywhere, expect):
    """Everywhere, or on one rank alone: all raise, and the message names who could not."""
    with raises_everywhere(cc.CupyCollError, "gather_jagged_object_lists.*no way back"):
        cc.gather_jagged_object_lists([BreaksWhenUnpickled()] if rank == 0 else [1])
    if size > 1:
        for odd in range(size):
            with raises_everywhere(cc.CupyCollError, f"gather_jagged_object_lists.*rank {odd}.*no way back"):
                cc.gather_jagged_object_lists([BreaksWhenUnpickled(odd)] if rank == (odd + 1) % size else [1])
    expect(cc.gather_jagged_object_lists([rank]), list(range(size)))


# --------------------------------------------------------------------------------------------- all_reduce_dict


def test_all_reduce_dict(group_of, expect, rank):
    """Python numbers, NumPy scalars and 0-d tensors; keys in any order; Python numbers come back."""
    for ranks in group_of.several():
        group = group_of(ranks)
        n = len(ranks)
        mine = {
            "loss": rank + 0.5,
            "count": rank,
            "flag": rank == ranks[0],
            "array": np.float64(2.0 * rank),
            "tensor": torch.tensor(3 * rank),
            "grad": torch.tensor(1.0, requires_grad=True),
            "zero-d": np.array(rank),
        }
        if rank % 2:
            mine = dict(reversed(mine.items()))
        before = dict(mine)
        if group is None:
            expect(cc.all_reduce_dict(mine, outside(ranks)), None, f"{ranks}: outside")
            continue
        total = sum(ranks)
        sums = {
            "loss": total + 0.5 * n,
            "count": float(total),
            "flag": 1.0,
            "array": 2.0 * total,
            "tensor": 3.0 * total,
            "grad": float(n),
            "zero-d": float(total),
        }
        got = cc.all_reduce_dict(mine, group)
        expect(got, sums, f"{ranks}: SUM")
        expect(list(got), sorted(sums), "keys are sorted")
        expect.that(all(type(value) is float for value in got.values()), f"{ranks}: not Python floats")
        expect(list(mine), list(before), "input changed")
        averages = cc.all_reduce_dict(mine, group, ReduceOp.AVG)
        for key, value in sums.items():
            expect.that(abs(averages[key] - value / n) < 1e-6 * max(1, value), f"{ranks}: AVG of {key}")
        expect(cc.all_reduce_dict({"x": float(rank)}, group, op=ReduceOp.MAX), {"x": float(max(ranks))}, "MAX")


def test_dict_dtype(world, size, expect):
    """Numbers are those of the dtype: 0.1 is rounded to float32, and an integer stays exact in int64."""
    expect(cc.all_reduce_dict({"x": 0.1}, world, ReduceOp.MAX), {"x": float(np.float32(0.1))})
    expect(cc.all_reduce_dict({"x": 0.1}, world, ReduceOp.MAX, torch.float64), {"x": 0.1})
    got = cc.all_reduce_dict({"x": 2**53 + 1, "y": torch.tensor(2**60 + 1)}, world, dtype=torch.int64)
    expect(got, {"x": (2**53 + 1) * size, "y": (2**60 + 1) * size})
    mixed = cc.all_reduce_dict({"x": 2**53 + 1, "y": 0.5}, world, ReduceOp.MAX, dtype=torch.int64)
    expect(mixed, {"x": 2**53 + 1, "y": 0}, "an integer beside a float")
    expect(type(got["x"]), int)


def test_dict_same_on_all_ranks(world, rank, share, expect):
    got = cc.all_reduce_dict({f"k{i}": 0.1 * (rank + 1) * 10.0**i for i in range(-5, 6)}, world, ReduceOp.AVG)
    expect.that(len({str(other) for other in share(got)}) == 1, "ranks differ")


def test_empty_dict(world, expect):
    expect(cc.all_reduce_dict({}, world), {})


def test_many_keys(world, rank, size, expect):
    got = cc.all_reduce_dict({f"key {i:04}": i + rank for i in range(3000)}, world, dtype=torch.float64)
    base = size * (size - 1) // 2
    expect(got, {f"key {i:04}": float(i * size + base) for i in range(3000)})


def test_keys_that_differ_raise_everywhere(world, rank, size, raises_everywhere, expect):
    """Another name, one key more, the same number of other keys: always, and the next operation works."""
    if size < 2:
        pytest.skip(f"needs 2 ranks, this run has {size}")
    odd = size - 1
    with raises_everywhere(cc.MismatchError, rf"all_reduce_dict.*{odd}") as raised:
        cc.all_reduce_dict({"a": 1.0, "typo" if rank == odd else "b": 2.0}, world, ReduceOp.AVG)
    expect.that(all("typo" in message for message in raised.messages.values()), str(raised.messages))
    with raises_everywhere(cc.MismatchError, "all_reduce_dict"):
        cc.all_reduce_dict({"a": 1.0, **({"b": 2.0} if rank == odd else {})}, world)
    with raises_everywhere(cc.MismatchError, "all_reduce_dict"):
        cc.all_reduce_dict({} if rank == 0 else {"a": 1.0}, world)
    expect(cc.all_reduce_dict({"a": 1.0}, world), {"a": float(size)})


def test_bad_dicts_raise_everywhere(world, rank, size, raises_everywhere):
    odd = rank == size - 1
    for bad in ({"a": "text"}, {"a": torch.ones(2)}, {"a": None}, {"a": np.ones(3)}, [1.0], None):
        with raises_everywhere(cc.CupyCollError, "all_reduce_dict"):
            cc.all_reduce_dict(bad if odd else {"a": 1.0}, world)
    with raises_everywhere(cc.CupyCollError, "all_reduce_dict"):
        cc.all_reduce_dict({"a": 1.0}, world, ReduceOp.BAND)
