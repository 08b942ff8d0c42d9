"""all_reduce, reduce and reduce_scatter: which values, which dtypes, which bits."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from support import COMPLEX, FLOAT8, FLOATS, INTEGERS, KINDS, LAYOUTS, REDUCED, Placed, cases, ended, name, tensor_of
from torch.distributed import ReduceOp

import cupy_coll as cc

ARITHMETIC = ["SUM", "AVG", "PRODUCT", "MIN", "MAX"]
BITWISE = ["BAND", "BOR", "BXOR"]


def allowed(dtype: torch.dtype) -> list[str]:
    if dtype == torch.bool:
        return ["SUM", "PRODUCT", "MIN", "MAX", *BITWISE]
    if dtype in INTEGERS:
        return ARITHMETIC + BITWISE
    return ARITHMETIC if dtype in FLOATS else ["SUM", "AVG", "PRODUCT"]


def contribution(shape: Iterable[int], rank: int) -> np.ndarray:
    """1, 2 or 3: a product over four ranks stays exact in every dtype."""
    shape = tuple(shape)
    return ((np.arange(math.prod(shape)) * 2 + rank) % 3 + 1).reshape(shape)


def reduced(op: str, shape: Iterable[int], dtype: torch.dtype, ranks: Iterable[int]) -> torch.Tensor:
    """The expected value, computed in Python's and NumPy's widest types."""
    parts = [tensor_of(contribution(shape, rank), dtype) for rank in ranks]
    if dtype == torch.bool:
        stack = np.stack([part.numpy() for part in parts])
        folds = {
            "SUM": np.any,
            "MAX": np.any,
            "BOR": np.any,
            "PRODUCT": np.all,
            "MIN": np.all,
            "BAND": np.all,
        }
        if op == "BXOR":
            return torch.from_numpy(np.asarray(stack.sum(axis=0) % 2 == 1))
        return torch.from_numpy(np.asarray(folds[op](stack, axis=0)))
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype in FLOATS else torch.int64
    stack = np.stack([part.to(wide).numpy() for part in parts])
    if op == "AVG":
        total = stack.sum(axis=0)
        mean = np.trunc(total / len(parts)).astype(np.int64) if dtype in INTEGERS else total / len(parts)
        return torch.from_numpy(np.asarray(mean)).to(dtype)
    folds = {
        "SUM": np.add,
        "PRODUCT": np.multiply,
        "MIN": np.minimum,
        "MAX": np.maximum,
        "BAND": np.bitwise_and,
        "BOR": np.bitwise_or,
        "BXOR": np.bitwise_xor,
    }
    return torch.from_numpy(np.asarray(folds[op].reduce(stack, axis=0))).to(dtype)


def tolerance(op: str, dtype: torch.dtype) -> float:
    """A quotient may be rounded once more; everything else here is exact."""
    return torch.finfo(dtype).eps if op == "AVG" and dtype not in INTEGERS else 0.0


@pytest.mark.parametrize("dtype", REDUCED, ids=name)
def test_all_reduce(dtype, group_of, expect, rank):
    for ranks in group_of.several():
        group = group_of(ranks)
        for op in allowed(dtype):
            for shape, layout in cases(dtype) if op in ("SUM", "MAX") else [((4, 3), "contiguous")]:
                for async_op in (False, True) if op == "SUM" else (False,):
                    label = f"{op} {ranks} {shape} {layout} async={async_op}"
                    placed = Placed(tensor_of(contribution(shape, rank), dtype), layout)
                    work = cc.all_reduce(
                        placed.view,
                        group or f"TEST_{'_'.join(map(str, ranks))}",
                        getattr(ReduceOp, op),
                        async_op,
                    )
                    if group is None:
                        expect(work, None, label)
                        expected = tensor_of(contribution(shape, rank), dtype)
                        expect(placed.view, expected, f"{label}: touched outside")
                        continue
                    ended(expect, work, async_op, label)
                    expected = reduced(op, shape, dtype, ranks)
                    expect(placed.view, expected, label, rtol=tolerance(op, dtype))
                    expect.that(not placed.spilled(), f"{label}: wrote beside the view")


@pytest.mark.parametrize("dtype", KINDS, ids=name)
def test_reduce(dtype, group_of, expect, rank):
    for ranks in group_of.several():
        group = group_of(ranks)
        for index, dst in enumerate(ranks):
            for op in allowed(dtype) if index == len(ranks) - 1 else ["SUM"]:
                for layout, async_op in (("contiguous", False), ("transposed", True)):
                    label = f"{op} {ranks} to {dst} {layout} async={async_op}"
                    placed = Placed(tensor_of(contribution((2, 3), rank), dtype), layout)
                    root = {"dst": dst} if async_op else {"dst": None, "group_dst": index}
                    if root["dst"] is None:
                        del root["dst"]
                    if group is None:
                        expect(cc.reduce(placed.view, f"TEST_{'_'.join(map(str, ranks))}", **root), None, label)
                        continue
                    work = cc.reduce(placed.view, group, op=getattr(ReduceOp, op), async_op=async_op, **root)
                    ended(expect, work, async_op, label)
                    if rank == dst:
                        expected = reduced(op, (2, 3), dtype, ranks)
                        expect(placed.view, expected, label, rtol=tolerance(op, dtype))
                    expect.that(not placed.spilled(), f"{label}: wrote beside the view")


@pytest.mark.parametrize("dtype", KINDS, ids=name)
def test_reduce_scatter(dtype, group_of, expect, rank):
    for ranks in group_of.several():
        group = group_of(ranks)
        if group is None:
            continue
        for op in allowed(dtype):
            combinations = [("contiguous", False), ("strided", True), ("transposed", False)]
            for layout, async_op in combinations if op == "SUM" else combinations[-1:]:
                for stacked in (False, True) if op == "SUM" else (False,):
                    label = f"{op} {ranks} {layout} async={async_op} stacked={stacked}"
                    shape = (group.size, 2, 3) if stacked else (group.size * 2, 3)
                    source = Placed(tensor_of(contribution(shape, rank), dtype), layout)
                    before = source.view.clone()
                    output = Placed(torch.zeros(2, 3, dtype=dtype), layout)
                    work = cc.reduce_scatter(
                        output.view, source.view, group, op=getattr(ReduceOp, op), async_op=async_op
                    )
                    ended(expect, work, async_op, label)
                    expected = reduced(op, shape, dtype, ranks).reshape(group.size, 2, 3)[group.rank]
                    expect(output.view, expected, label, rtol=tolerance(op, dtype))
                    expect(source.view, before, f"{label}: input changed")
                    expect.that(not output.spilled(), f"{label}: wrote beside the output")


def test_reduce_scatter_of_nothing(group_of, world, expect):
    output = torch.zeros(0, 4)
    cc.reduce_scatter(output, torch.zeros(0, 4), world)
    expect(output, torch.zeros(0, 4))


def test_a4_bool(group_of, expect):
    """SUM and MAX are OR, PRODUCT and MIN are AND; in memory only 0 and 1."""
    group = group_of.of(2)
    if group is None:
        return
    mine = [[True, False, True], [True, False, False]][group.rank]
    answers = {"SUM": [True, False, True], "PRODUCT": [True, False, False]}
    for op, same in (("SUM", "SUM"), ("MAX", "SUM"), ("PRODUCT", "PRODUCT"), ("MIN", "PRODUCT")):
        tensor = torch.tensor(mine)
        cc.all_reduce(tensor, group, getattr(ReduceOp, op))
        expect(tensor, torch.tensor(answers[same]), op)
        expect(set(tensor.view(torch.uint8).tolist()) <= {0, 1}, True, f"{op}: bytes")


def test_bool_bytes_are_normalised(group_of, expect):
    """Memory that holds 2 for true (from a foreign library) reduces as true, to 1."""
    group = group_of.of(2)
    if group is None:
        return
    for op in ("SUM", "MAX", "MIN", "PRODUCT"):
        foreign = torch.tensor([2, 0, 255] if group.rank else [4, 0, 1], dtype=torch.uint8)
        cc.all_reduce(foreign.view(torch.bool), group, getattr(ReduceOp, op))
        expect(foreign, torch.tensor([1, 0, 1], dtype=torch.uint8), op)


def test_a5_transposed_view_in_place(group_of, expect):
    group = group_of.of(2)
    if group is None:
        return
    memory = torch.full((3, 4), group.rank + 1.0)
    view = memory.t()
    cc.all_reduce(view, group)
    expect(view, torch.full((4, 3), 3.0))
    expect(memory, torch.full((3, 4), 3.0))


@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_nan_reaches_every_rank(op, group_of, expect, rank, size):
    """Whoever holds the NaN, and wherever; other elements are not touched by it."""
    for ranks in group_of.several():
        group = group_of(ranks)
        if group is None:
            continue
        for dtype in FLOATS:
            for holder in range(group.size):
                tensor = torch.full((5,), float(group.rank), dtype=dtype)
                if group.rank == holder:
                    tensor[1] = math.nan
                    tensor[3] = -math.nan
                cc.all_reduce(tensor, group, getattr(ReduceOp, op))
                best = 0.0 if op == "MIN" else group.size - 1.0
                label = f"{op} {name(dtype)} {ranks} NaN from {holder}"
                expect(torch.isnan(tensor).tolist(), [False, True, False, True, False], label)
                expect(tensor[::2], torch.full((3,), best, dtype=dtype), label)

                scattered = torch.zeros(1, dtype=dtype)
                source = torch.full((group.size,), math.nan if group.rank == holder else 1.0, dtype=dtype)
                cc.reduce_scatter(scattered, source, group, getattr(ReduceOp, op))
                expect.that(torch.isnan(scattered).all(), f"reduce_scatter {label}")
                source = torch.full((2,), math.nan if group.rank == holder else 1.0, dtype=dtype)
                cc.reduce(source, group, ranks[-1], getattr(ReduceOp, op))
                if rank == ranks[-1]:
                    expect.that(torch.isnan(source).all(), f"reduce {label}")


def test_infinities(world, rank, size, expect):
    tensor = torch.tensor([math.inf if rank == 0 else 1.0, -math.inf if rank == size - 1 else 1.0])
    largest, smallest = tensor.clone(), tensor.clone()
    cc.all_reduce(largest, world, ReduceOp.MAX)
    cc.all_reduce(smallest, world, ReduceOp.MIN)
    other = 1.0 if size > 1 else -math.inf
    expect(largest, torch.tensor([math.inf, other]))
    expect(smallest, torch.tensor([1.0 if size > 1 else math.inf, -math.inf]))


def test_small_floats_sum_in_float32_and_round_once(group_of, expect):
    """256 + 1 stays 256 in bfloat16, so a running sum in it never passes 256; 2048 is float16's such number."""
    for ranks in group_of.several():
        group = group_of(ranks)
        if group is None:
            continue
        for dtype, big in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
            for op in ("SUM", "AVG"):
                mine = torch.full((300,), big if group.rank == 0 else 1.0, dtype=dtype)
                total = torch.tensor(big + group.size - 1.0)
                right = (total if op == "SUM" else total / group.size).to(dtype)
                summed = mine.clone()
                cc.all_reduce(summed, group, getattr(ReduceOp, op))
                expect(summed, right.expand(300), f"all_reduce {op} {name(dtype)} {ranks}")
                cc.reduce(mine.clone(), group, group_dst=0, op=getattr(ReduceOp, op))
                part = torch.zeros(3, dtype=dtype)
                source = mine[:1].repeat(3 * group.size)
                cc.reduce_scatter(part, source, group, getattr(ReduceOp, op))
                expect(part, right.expand(3), f"reduce_scatter {op} {name(dtype)} {ranks}")


def test_float16_average_does_not_overflow(world, expect):
    """The sum of 60,000s passes float16's range, their average does not."""
    tensor = torch.full((3,), 60000.0, dtype=torch.float16)
    cc.all_reduce(tensor, world, ReduceOp.AVG)
    expect(tensor, torch.full((3,), 60000.0, dtype=torch.float16))


def test_integer_average_truncates_toward_zero(group_of, expect):
    for ranks in group_of.several():
        group = group_of(ranks)
        if group is None:
            continue
        for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
            # sums: -(1 + 2 + ...) and its opposite, and one that is -1 alone
            first = group.rank + 1
            tensor = torch.tensor([-first, first, -1 if group.rank == 0 else 0, 100], dtype=dtype)
            total = group.size * (group.size + 1) // 2
            expected = [-(total // group.size), total // group.size, -1 if group.size == 1 else 0, 100]
            cc.all_reduce(tensor, group, ReduceOp.AVG)
            expect(tensor, torch.tensor(expected, dtype=dtype), f"{name(dtype)} {ranks}")


def test_wide_integers_are_exact(world, size, expect):
    """Values that a detour over floating point would round."""
    big = 2**53 + 1
    tensor = torch.tensor([big, -big], dtype=torch.int64)
    cc.all_reduce(tensor, world)
    expect(tensor, torch.tensor([big * size, -big * size], dtype=torch.int64))
    largest = torch.tensor([2**64 - 1, 2**63 + 1], dtype=torch.uint64)
    cc.all_reduce(largest, world, ReduceOp.MAX)
    expect(largest, torch.tensor([2**64 - 1, 2**63 + 1], dtype=torch.uint64))


def test_complex_products(group_of, expect):
    """i to the power of the group's size: a product taken part by part would give something else."""
    for ranks in group_of.several():
        group = group_of(ranks)
        if group is None:
            continue
        for dtype in COMPLEX:
            tensor = torch.tensor([1j, 2 - 1j], dtype=dtype)
            cc.all_reduce(tensor, group, ReduceOp.PRODUCT)
            power = {1: [1j, 2 - 1j], 2: [-1, 3 - 4j], 3: [-1j, 2 - 11j], 4: [1, -7 - 24j]}[group.size]
            expect.that(torch.equal(tensor, torch.tensor(power, dtype=dtype)), f"{name(dtype)} {ranks}: {tensor}")


def test_conjugate_and_negative_views(world, size, expect):
    """torch keeps conj() and .imag of it as flags on the memory of the original: values count, not memory."""
    tensor = torch.tensor([1 + 2j, 3 - 1j]).conj()
    cc.all_reduce(tensor, world)
    expect(tensor.resolve_conj(), torch.tensor([1 - 2j, 3 + 1j]) * size)
    gathered = torch.zeros(2 * size)
    cc.all_gather(gathered, torch.tensor([1 + 2j, 3 - 1j]).conj().imag, world)
    expect(gathered, torch.tensor([-2.0, 1.0]).repeat(size))


def random_parts(ranks: Iterable[int], count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    parts = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(1000 * rank + count)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        scale = 10.0 ** torch.randint(-3, 4, (count,), generator=generator)
        parts.append((torch.randn(count, generator=generator, dtype=wide) * scale).to(dtype))
    return parts


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64], ids=name)
def test_same_bits_on_all_ranks(dtype, group_of, share, expect, rank):
    """Sums of values of different magnitude, whose order of addition shows; sizes up to over a million."""
    counts = [1, 2, 3, 5, 8, 63, 1000, 4097, 65_537, 300_001]
    if dtype in (torch.float32, torch.bfloat16):
        counts.append(1_200_003)
    for ranks in group_of.several():
        group = group_of(ranks)
        for count in counts if len(ranks) > 1 and ranks[0] == 0 else counts[:7]:
            for op in ("SUM", "AVG") if count < 10**4 else ("SUM",):
                label = f"{op} {count} {ranks}"
                digest = None
                if group is not None:
                    parts = random_parts(ranks, count, dtype)
                    tensor = parts[group.rank].clone()
                    cc.all_reduce(tensor, group, getattr(ReduceOp, op))
                    digest = hashlib.sha256(tensor.view(torch.uint8).numpy()).hexdigest()
                    wide = torch.stack(
                        [part.to(torch.complex128 if dtype.is_complex else torch.float64) for part in parts]
                    )
                    exact = wide.sum(dim=0) / (group.size if op == "AVG" else 1)
                    error = (tensor.to(exact.dtype) - exact).abs()
                    allowed_error = wide.abs().sum(dim=0) * group.size * torch.finfo(torch.float32).eps
                    if dtype in (torch.float16, torch.bfloat16):
                        info = torch.finfo(dtype)
                        allowed_error = allowed_error + (exact.abs() + info.tiny) * info.eps
                    finite = torch.isfinite(tensor)
                    expect.that((error <= allowed_error)[finite].all(), f"{label}: off by {error.max()}")
                    expect.that(finite.all() or dtype == torch.float16, f"{label}: not finite")
                digests = {d for d in share(digest) if d is not None}
                expect.that(len(digests) == 1, f"{label}: {len(digests)} different results on the ranks")


def test_the_same_bits_at_every_call(world, rank, share, expect):
    (mine,) = random_parts([rank], 10_007, torch.float32)
    results = set()
    for layout in ("contiguous", "offset", "strided"):
        placed = Placed(mine, layout)
        cc.all_reduce(placed.view, world)
        results.add(hashlib.sha256(placed.view.contiguous().numpy()).hexdigest())
    expect.that(len(results) == 1, "layouts give different bits")


REFUSED = [
    (torch.bool, ["AVG"]),
    *[(dtype, BITWISE) for dtype in FLOATS],
    *[(dtype, ["MIN", "MAX", *BITWISE]) for dtype in COMPLEX],
]


@pytest.mark.parametrize(
    ("dtype", "ops"), REFUSED, ids=lambda value: name(value) if isinstance(value, torch.dtype) else ""
)
def test_refused_reductions(dtype, ops, world, size, raises_everywhere, expect):
    """A DTypeError that names function, dtype and reduction; nothing is sent and nothing is changed."""
    for op in ops:
        reduction = getattr(ReduceOp, op)
        tensor = torch.ones(size, dtype=dtype)
        output = torch.ones(1, dtype=dtype)
        started = world.sequence
        with raises_everywhere(cc.DTypeError, f"all_reduce.*{name(dtype)}.*{op}"):
            cc.all_reduce(tensor, world, reduction)
        with raises_everywhere(cc.DTypeError, f"reduce.*{name(dtype)}.*{op}"):
            cc.reduce(tensor, world, 0, reduction)
        with raises_everywhere(cc.DTypeError, f"reduce_scatter.*{name(dtype)}.*{op}"):
            cc.reduce_scatter(output, tensor, world, reduction)
        expect(world.sequence - started, 3, "only the three barriers were sent")
        expect(tensor, torch.ones(size, dtype=dtype), op)


def test_other_ops_are_refused(world, raises_everywhere):
    for op in (torch.distributed._make_nccl_premul_sum(2.0), "sum", 0, None):
        with raises_everywhere(cc.ArgumentError, "all_reduce.*op"):
            cc.all_reduce(torch.ones(2), world, op)


def test_float8_is_reduced_or_refused(world, size, share, expect):
    """Where it is reduced it is in float32, rounded once."""
    for dtype in FLOAT8:
        tensor = torch.full((3,), 1.0).to(dtype)
        try:
            cc.all_reduce(tensor, world)
            outcome = "reduced"
            expect(tensor, torch.full((3,), float(size)).to(dtype), name(dtype))
        except cc.DTypeError:
            outcome = "refused"
        expect.that(len(set(share(outcome))) == 1, "not the same on all ranks")


def test_expanded_tensors_are_refused(world, rank, size, raises_everywhere, expect):
    """Several elements in one place of memory cannot hold several results."""
    memory = torch.ones(1, 4)
    started = world.sequence
    with raises_everywhere(cc.ShapeError, "all_reduce.*tensor"):
        cc.all_reduce(memory.expand(3, 4), world)
    with raises_everywhere(cc.ShapeError, "reduce.*tensor", ranks=[0]):  # the others only read theirs
        if rank == 0:
            cc.reduce(memory.expand(3, 4), world)
    with raises_everywhere(cc.ShapeError, "reduce_scatter.*output"):
        cc.reduce_scatter(memory.expand(3, 4), torch.ones(3 * size, 4), world)
    with raises_everywhere(cc.ShapeError, "all_reduce.*tensor"):  # overlapping without a stride of 0
        cc.all_reduce(torch.ones(6).as_strided((4, 3), (1, 1)), world)
    expect(world.sequence - started, 4, "only the four barriers were sent")
    expect(memory, torch.ones(1, 4))


def test_expanded_input_of_reduce_scatter(world, size, expect):
    output = torch.zeros(2, 3)
    cc.reduce_scatter(output, torch.tensor([[1.0, 2.0, 3.0]]).expand(2 * size, 3), world)
    expect(output, torch.tensor([[1.0, 2.0, 3.0]]).expand(2, 3) * size)


def test_bad_arguments_of_reduce_scatter(world, size, raises_everywhere):
    with raises_everywhere(cc.ShapeError, "reduce_scatter.*output_tensor"):
        cc.reduce_scatter(torch.zeros(3), torch.zeros(3 * size + 1), world)
    with raises_everywhere(cc.DTypeError, "reduce_scatter.*float64"):
        cc.reduce_scatter(torch.zeros(3), torch.zeros(3 * size, dtype=torch.float64), world)


def test_layouts_of_a_single_element_dimension(world, size, expect):
    """Strides of dimensions of size 1 mean nothing, also where they are 0."""
    tensor = torch.ones(4).as_strided((1, 4), (0, 1))
    cc.all_reduce(tensor, world)
    expect(tensor, torch.full((1, 4), float(size)))
    for layout in LAYOUTS:
        placed = Placed(torch.ones(1, 1, 3), layout)
        cc.all_reduce(placed.view, world)
        expect(placed.view, torch.full((1, 1, 3), float(size)), layout)
