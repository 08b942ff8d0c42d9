"""Each CUDA kernel against float64, with the geometry and arguments that a GPU gets, and what it reads and writes.

They run on the processor (``tests/kernels_on_host``) with every check: bounds, barriers, races.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from kernels_on_host.device import HostDevice
from logprob_ranks import groups_of, logprob, on_ranks, reference, same_bits, within_tolerance
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cupy_coll import (
    ChunkedDistributedGatherLogprob,
    DistributedLogprob,
    _compute_distributed_log_softmax,
    from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs_packed_sequences,
    vocab_parallel_log_softmax,
    vocab_parallel_logprob_and_entropy,
)
from cupy_coll.logprob import launch
from cupy_coll.logprob.partials import MessageLayout, Shard
from cupy_coll.logprob.sweeps import Upstream

INF, NAN = float("inf"), float("nan")
TYPES = [torch.bfloat16, torch.float16, torch.float32]
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 0.0}  # half a unit in the last place
SUBNORMAL = {torch.float16: 2**-25, torch.bfloat16: 0.0, torch.float32: 0.0}


@pytest.fixture
def device() -> Iterator[HostDevice]:
    with HostDevice(checks=True).installed() as host:
        yield host


def one_rank():
    return groups_of(1, 1)[0][0]


def both(logits: Tensor, target: Tensor, **options) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy where one rank has the whole vocabulary."""
    ends = {"vocab_start_index": 0, "vocab_end_index": logits.shape[-1]}
    return vocab_parallel_logprob_and_entropy(logits, target, one_rank(), **ends, **options)


def close(gradient: Tensor, expected: Tensor) -> bool:
    """Within 1e-6 of the incoming gradients' size, relatively 1e-5, and one rounding to the logits' type."""
    error = (gradient.double() - expected).abs()
    allowed = 2e-6 + SUBNORMAL[gradient.dtype] + (1e-5 + ROUNDING[gradient.dtype]) * expected.abs()
    return bool((torch.where(expected.isnan(), gradient.isnan(), error <= allowed)).all())


def check(logits: Tensor, target: Tensor) -> None:
    """Values, and gradients for four kinds of incoming ones, with and without entropy."""
    torch.manual_seed(0)
    rows = target.shape
    expected = reference(logits, target)
    leaf = logits.detach().requires_grad_()
    value, entropy = both(leaf, target)
    assert within_tolerance(value, expected.logprob.float().double())  # beyond float32's range it is infinite
    assert within_tolerance(entropy, expected.entropy)
    alone = DistributedLogprob.apply(leaf, target, 0, logits.shape[-1], one_rank())
    assert same_bits(alone, value)
    g, h = torch.randn(rows), torch.randn(rows)
    (found,) = torch.autograd.grad((value, entropy), leaf, (g, h))
    assert close(found, expected.gradient(g, h))
    (found,) = torch.autograd.grad(alone, leaf, g)
    assert close(found, expected.gradient(g))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 7, 31, 257, 1024, 4097, 16 * 501, 50_257])
def test_any_vocabulary(dtype, vocab, device):
    torch.manual_seed(vocab)
    target = torch.randint(0, vocab, (3,))
    target[1] = -100
    check((torch.randn(3, vocab) * 5).to(dtype), target)


@pytest.mark.parametrize("vocab", [128_256, 262_144])
def test_large_vocabularies(vocab, device):
    torch.manual_seed(vocab)
    check((torch.randn(2, vocab) * 3).bfloat16(), torch.randint(0, vocab, (2,)))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_huge_and_tiny_magnitudes(dtype, device):
    """Up to the largest number of the type, whose differences overflow float32, and down to its smallest."""
    torch.manual_seed(0)
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    sizes = torch.tensor([[1e4], [largest], [-largest], [smallest], [1e-3]], dtype=torch.float64)
    logits = (torch.rand(5, 600, dtype=torch.float64) * sizes).to(dtype)
    logits[1, 3], logits[2, 5] = -largest, largest
    logits = torch.cat((logits, (torch.rand(1, 600) * 100 - 2e4).to(dtype)))
    check(logits, torch.tensor([3, 3, 5, 0, 599, 7]))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_infinities_and_nan(dtype, device):
    torch.manual_seed(0)
    logits = (torch.randn(9, 1040) * 3).to(dtype)
    logits[0] = -INF
    logits[1, :520] = -INF
    logits[2, 520:] = -INF
    logits[3, ::2] = -INF
    logits[4] = -INF
    logits[4, 700] = 1.5
    logits[5] = -INF
    logits[5, 1], logits[5, 2] = NAN, 1.0
    logits[6, 1039] = NAN
    logits[7, 8] = INF
    target = torch.tensor([0, 0, 1039, 1, 700, 2, 5, 8, 3])
    check(logits, target)


def test_a_nan_is_seen_wherever_it_is(device):
    """In any lane, vector and unit; beside -inf only, too."""
    for vocab in (40, 5000):
        for filler in (0.0, -INF):
            logits = torch.full((vocab // 5, vocab), filler)
            logits[torch.arange(vocab // 5), torch.arange(vocab // 5) * 5] = NAN
            value, entropy = both(logits, torch.zeros(vocab // 5, dtype=torch.int64))
            assert value.isnan().all()
            assert entropy.isnan().all()


def layouts(dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(0)
    x = (torch.randn(4, 6, 3, 530) * 4).to(dtype)
    return {
        "a slice of each sequence": x[:, :-1, 0],
        "a slice in two dimensions": x[:, 1:, :2],
        "a slice in two dimensions, transposed": x[:, 1:, :2].transpose(0, 2),
        "transposed": x[:, :, 0].transpose(0, 1),
        "misaligned": x[0, 0, :, 1:],
        "misaligned by a word": x[0, 0, :, 2:],
        "every other column": x[0, 0, :, ::2],
        "vocabulary first": x[:, 0, 0].t(),
        "expanded rows": x[0, 0, :1].expand(5, 530),
        "expanded columns": x[0, 0, :, :1].expand(3, 100),
        "one row": x[0, 0, 0],
        "no rows": x[:0, 0, 0],
    }


@pytest.mark.parametrize("name", layouts(torch.float32))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_same_bits_for_any_layout(name, dtype, device):
    """In a launch for all rows, unless three dimensions of them are steps of their own."""
    logits = layouts(dtype)[name].detach()
    target = torch.randint(0, logits.shape[-1], logits.shape[:-1])
    found = []
    for x in (logits, logits.clone(memory_format=torch.contiguous_format)):
        before = len(device.launches)
        leaf = x.requires_grad_()
        value, entropy = both(leaf, target)
        pieces = {"a slice in two dimensions": 4, "a slice in two dimensions, transposed": 2}.get(name, 1)
        forward = [one.kernel.name for one in device.launches[before:]]
        merges = ["merge_partials"] * (value.numel() > 0)
        assert forward == ["softmax_partials"] * (pieces if x is logits else 1) + merges
        gradient = torch.autograd.grad((value, entropy), leaf, (torch.ones(value.shape), torch.ones(value.shape)))[0]
        found.append((value, entropy, gradient))
    assert all(same_bits(one, other) for one, other in zip(*found, strict=True))


def test_no_bit_depends_on_the_geometry(device, monkeypatch):
    torch.manual_seed(0)
    logits, target = torch.randn(5, 16 * 5000).bfloat16(), torch.randint(0, 80_000, (5,))
    expected = both(logits, target)
    for threads, blocks, reverse in ((256, 1, False), (64, 1, True), (32, 9999, False), (128, 10, True)):
        monkeypatch.setattr(launch, "THREADS", threads)
        monkeypatch.setattr(launch, "ENOUGH_BLOCKS", blocks)
        device.reverse = reverse
        assert all(same_bits(a, b) for a, b in zip(both(logits, target), expected, strict=True)), (threads, blocks)


def test_units_of_very_wide_tiles(device, monkeypatch):
    """Their number is bounded by the shared memory; their width then follows from the tile's."""
    monkeypatch.setattr(launch, "MOST_UNITS", 2)
    torch.manual_seed(0)
    check(torch.randn(2, 30_001), torch.tensor([0, 30_000]))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("columns", [8192, 16 * 2000])
@pytest.mark.parametrize("entropy", [False, True])
def test_bytes_and_sectors(dtype, columns, entropy, device):
    """One read forward, one read and one write backward, in whole sectors and 16 bytes at a time."""
    device.sectors = True
    rows, size = 4, dtype.itemsize
    torch.manual_seed(0)
    leaf = torch.randn(rows, columns).to(dtype).requires_grad_()
    target = torch.randint(0, columns, (rows,))
    result = sum(both(leaf, target)) if entropy else DistributedLogprob.apply(leaf, target, 0, columns, one_rank())
    result.sum().backward()
    forward, merge, backward = device.launches
    every = rows * columns * size
    vectors = {16: every // 16}
    reads, _ = forward.counts["logits"]
    assert reads.nbytes == every + rows * size  # and the targets once more
    assert reads.accesses == {size: rows, **vectors}
    assert reads.sectors <= every // 32 + rows
    numbers = rows * (16 * (3 if entropy else 2) + 1)
    assert forward.counts["message"][1].nbytes == 4 * (8 + numbers)
    assert merge.counts["gathered"][0].nbytes <= 4 * 3 * (8 * rows + numbers)
    reads, writes = backward.counts["logits"][0], backward.counts["result"][1]
    assert reads.nbytes == writes.nbytes == every + rows * size  # and the targets' once more
    assert reads.accesses == writes.accesses == {size: rows, **vectors}
    assert reads.sectors == writes.sectors == every // 32 + rows
    assert sum(writes.nbytes for _, writes in backward.counts.values()) == every + rows * size


@pytest.mark.parametrize(
    ("columns", "offset", "width"), [(8200, 0, 16), (8196, 0, 8), (8194, 0, 4), (8193, 0, 2), (8200, 1, 2)]
)
def test_loads_are_as_wide_as_the_alignment_of_all_rows_allows(columns, offset, width, device):
    """Their number grows where it is low; bytes do not."""
    rows = 3
    memory = torch.randn(rows * columns + offset).bfloat16()
    logits = memory[offset:].view(rows, columns).requires_grad_()
    DistributedLogprob.apply(logits, torch.zeros(rows, dtype=torch.int64), 0, columns, one_rank()).sum().backward()
    forward, _, backward = device.launches
    assert forward.kernel.arguments == f"Bf16, {width}, false"
    reads = forward.counts["logits"][0]
    assert reads.nbytes == 2 * rows * (columns + 1)
    assert max(reads.accesses) == width
    tail = rows * (columns % 8) + rows
    assert reads.accesses[width] >= (rows * columns - tail) * 2 // width
    assert backward.counts["logits"][0].nbytes == 2 * rows * (columns + 1)


@pytest.mark.parametrize("entropy", [False, True])
def test_rows_without_incoming_gradients_are_not_read(entropy, device):
    logits = torch.full((4, 3000), NAN, dtype=torch.float16)
    logits[2] = torch.randn(3000)
    leaf = logits.requires_grad_()
    value, h = both(leaf, torch.zeros(4, dtype=torch.int64))
    device.launches.clear()
    g = torch.tensor([0.0, -0.0, 1.0, 0.0])
    (gradient,) = torch.autograd.grad((value, h) if entropy else value, leaf, (g, g) if entropy else g)
    counts = device.launches[0].counts
    assert counts["logits"][0].nbytes == 6000 + 2  # and its target's once more
    assert counts["result"][1].nbytes == 24_000 + 2
    assert not gradient[[0, 1, 3]].any()
    assert gradient[2].isfinite().all()


def test_rows_of_ignored_targets_are_not_read(device):
    logits = torch.randn(5, 2048)
    target = torch.tensor([-100, 3, -100, -100, 7])
    DistributedLogprob.apply(logits, target, 0, 2048, one_rank())
    assert device.launches[0].counts["logits"][0].nbytes == 2 * 4 * (2048 + 1)


def test_offsets_past_32_bits(tmp_path, device):
    """Rows of a file of 14 GB, of which only what is touched takes room; backward in place."""
    outer, inner, columns = 2_500_000_000, 1_250_000_001, 100
    size = 2 * outer + inner + columns
    flat = torch.from_numpy(np.memmap(tmp_path / "sparse", np.float16, "w+", shape=(size,)))
    torch.manual_seed(0)
    logits = flat.as_strided((3, 2, columns), (outer, inner, 1))
    logits.copy_(torch.randn(3, 2, columns))
    before, target = logits.clone(), torch.tensor([[5, 99], [0, 1], [50, 3]])
    expected = reference(before, target)
    value, entropy = both(logits, target)
    assert within_tolerance(value, expected.logprob)
    assert within_tolerance(entropy, expected.entropy)
    maximum = before.float().amax(-1)
    log_sum = (before.double() - maximum.unsqueeze(-1)).exp().sum(-1).log().float()
    upstream = Upstream(torch.ones(3, 2), None, target)
    launch.logprob_backward(device, logits, logits, maximum, log_sum, None, upstream, columns, 1.0)
    assert close(logits.clone(), expected.gradient(torch.ones(3, 2)))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("targets", [1, 2, 65])
def test_several_targets_of_a_row(dtype, targets, device):
    """Some of them twice, some ignored, some on another rank."""
    torch.manual_seed(0)
    logits = (torch.randn(3, 9000) * 2).to(dtype)
    indices = torch.randint(4000, 4600 if targets > 2 else 9000, (3, targets))
    indices[0, 0] = -100
    if targets > 1:
        indices[1, 1] = indices[1, 0]
        indices[2, 1] = 8999
    shards = [logits[:, :4500].clone().requires_grad_(), logits[:, 4500:].clone().requires_grad_()]
    values = on_ranks(
        2,
        lambda group: ChunkedDistributedGatherLogprob.apply(
            shards[group.rank], indices, 4500 * group.rank, 4500 * group.rank + 4500, 2, group
        ),
    )
    wide = logits.double().requires_grad_()
    expected = torch.log_softmax(wide, -1).gather(-1, indices.clamp(min=0)) * (indices != -100)
    assert same_bits(*values)
    assert within_tolerance(values[0], expected.detach())
    g = torch.randn(3, targets)
    (wanted,) = torch.autograd.grad(expected, wide, g.double())
    found = torch.cat(
        [torch.autograd.grad(value, shard, g)[0] for value, shard in zip(values, shards, strict=True)], -1
    )
    error = (found.double() - wanted).abs()
    assert (error <= 2e-6 * math.sqrt(targets) + ROUNDING[dtype] * wanted.abs() + SUBNORMAL[dtype]).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("columns", [3000, 2999])
def test_log_softmax(dtype, columns, device):
    torch.manual_seed(0)
    logits = (torch.randn(2, 3, columns) * 4).to(dtype)
    expected = torch.log_softmax(logits.double(), -1)
    found = _compute_distributed_log_softmax(logits, one_rank())
    assert found.dtype == dtype
    assert ((found.double() - expected).abs() <= 1e-6 + (1e-6 + ROUNDING[dtype]) * expected.abs()).all()
    found = vocab_parallel_log_softmax(logits.transpose(0, 1), 2.0)
    assert found.dtype == torch.float32
    assert (found.double() - torch.log_softmax(logits.double().transpose(0, 1) / 2, -1)).abs().max() < 5e-6


@pytest.mark.parametrize(("dtype", "largest"), [(torch.bfloat16, 300.0), (torch.float16, 3000.0)], ids=str)
@pytest.mark.parametrize("columns", [64, 61])
def test_rounding_is_to_the_nearest_and_of_ties_to_even(dtype, largest, columns, device):
    """Beside a maximum so large the results are integers, of which the type has the even ones."""
    logits = torch.arange(columns).to(dtype).view(1, columns)
    logits[0, 0] = largest
    expected = (logits.float() - largest).to(dtype)
    assert same_bits(_compute_distributed_log_softmax(logits, one_rank()), expected)


def test_in_place(device):
    torch.manual_seed(0)
    for dtype, columns in ((torch.bfloat16, 4099), (torch.float32, 4096)):
        logits, target = torch.randn(3, columns).to(dtype), torch.tensor([0, 4000, 7])
        leaf = logits.clone().requires_grad_()
        sum(both(leaf, target)).sum().backward()
        hidden = logits.clone().requires_grad_()
        inner = hidden * 1
        sum(both(inner, target, inplace_backward=True)).sum().backward()
        assert same_bits(hidden.grad, leaf.grad)
        read, written = device.launches[-1].counts["result"]  # which is where the logits are
        assert read.nbytes == written.nbytes == logits.nbytes + 3 * logits.itemsize


# ---------------------------------------------------------------------- what is wrong gives NaN, and nobody waits


def merged(headers: list[tuple[int, int, int, int]], target: list[int], entropy: bool = False) -> Tensor:
    """Log-probabilities of uniform logits of 16 columns a rank, as the messages with these headers give them."""
    rows = len(target)
    layout = MessageLayout(len(headers), rows, entropy, torch.float32)
    messages = []
    with HostDevice(checks=True).installed() as device:
        for start, end, columns, its_rows in headers:
            shard = Shard(len(messages), len(headers), 16, 16 * len(messages), 16 * len(messages) + 16)
            local = shard.local_target(torch.tensor(target))
            message = launch.softmax_partials(device, torch.zeros(rows, 16), local, shard, layout, 1.0)
            message[:8].view(torch.int64).copy_(torch.tensor([start, end, columns, its_rows]))
            messages.append(message)
        summary = launch.merge_partials(device, torch.cat(messages), torch.tensor(target), layout, 1.0)
    assert summary.logprob is not None
    return summary.logprob


def test_ranges_that_do_not_fit_are_nan():
    right = [(0, 16, 16, 2), (16, 32, 16, 2)]
    assert torch.allclose(merged(right, [3, 20]), torch.tensor(-math.log(32)))
    empty = merged([(0, 16, 16, 2), (5, 5, 16, 2)], [3, -100])  # a rank that owns nothing may say so anywhere
    assert empty[0].isfinite()
    for wrong in (
        [(0, 16, 16, 2), (17, 33, 16, 2)],
        [(1, 17, 16, 2), (17, 33, 16, 2)],
        [(0, 16, 16, 2), (15, 31, 16, 2)],
        [(16, 32, 16, 2), (0, 16, 16, 2)],
        [(0, 16, 16, 2), (16, 33, 16, 2)],
        [(0, 16, 16, 2), (16, 15, 16, 2)],
        [(-1, 15, 16, 2), (15, 31, 16, 2)],
        [(0, 16, 16, 2), (16, 32, 16, 3)],
    ):
        assert merged(wrong, [3, 5]).isnan().all(), wrong


@pytest.mark.parametrize("bad", [32, -1, -99, -101, 2**40])
def test_a_target_that_nobody_owns_is_nan(bad):
    found = merged([(0, 16, 16, 3), (16, 32, 16, 3)], [0, bad, -100])
    assert found.isnan().tolist() == [False, True, False]
    assert found[2] == 0


class NobodyLooks(TorchDispatchMode):
    """Operations that would make the host wait for a GPU."""

    WAITING = ("_local_scalar_dense", "nonzero", "equal", "unique", "masked_select", "item")

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function.name().split("::")[1].split(".")[0]
        assert not any(name.startswith(waiting) for waiting in self.WAITING), name
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("inplace_backward", [False, True])
def test_the_host_waits_for_nothing(inplace_backward, device):
    logits, tokens = torch.randn(2, 6, 320), torch.randint(0, 320, (2, 6))
    group = one_rank()
    with NobodyLooks():
        leaf = logits.clone().requires_grad_()
        sum(both(leaf * 1, tokens, inplace_backward=inplace_backward)).sum().backward()
        leaf = logits.clone().requires_grad_()
        from_parallel_logits_to_logprobs(leaf, tokens, 0, 320, group).sum().backward()
        packed = logits.view(1, 12, 320).clone().requires_grad_()
        ends = torch.tensor([0, 5, 12])
        from_parallel_logits_to_logprobs_packed_sequences(
            packed, tokens.view(1, 12), ends, 7, 0, 320, group
        ).sum().backward()
        _compute_distributed_log_softmax(logits, group)


def test_float64_stays_with_torch(device):
    logits = torch.randn(3, 50, dtype=torch.float64)
    found = logprob(logits, torch.tensor([1, 2, 3]), 2)
    assert found.value.dtype == torch.float64
    assert not device.launches
