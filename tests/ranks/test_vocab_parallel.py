"""Soft targets, log-softmax, logits of tokens and top-k over a vocabulary that is split over real ranks."""

from __future__ import annotations

import pytest
import torch
from test_logprob_on_ranks import IGNORED, draw, member_tests, part, raw

import cupy_coll as cc

WIDTHS = {1: [96], 2: [50, 46], 3: [48, 0, 48], 4: [24] * 4}
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10}


def close(expect, actual, expected, dtype, what):
    scale = expected.abs()
    limit = (1e-5 + ROUNDING.get(dtype, 0.0)) * scale + 1e-6 * scale.clamp(min=1)
    worst = ((actual.double() - expected).abs() - limit).max() if expected.numel() else torch.tensor(-1.0)
    expect.that(bool(worst <= 0) and actual.shape == expected.shape, f"{what}: {actual} instead of {expected}")


def float64(function, *logits, upstream):
    wide = [x.detach().double().requires_grad_() for x in logits]
    value = function(*wide)
    return value.detach(), torch.autograd.grad(value, wide, upstream.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_log_softmax(group_of, size, expect, dtype):
    logits, _ = draw(6, 96, 30.0, dtype)
    logits[2, 40:] = -torch.inf
    upstream = torch.linspace(-1, 1, 6 * 96, dtype=torch.float64).view(6, 96)
    expected, (gradient,) = float64(lambda x: torch.log_softmax(x / 0.7, -1), logits, upstream=upstream)
    for group in member_tests(group_of, size):
        shard, start, end = part(logits, group, WIDTHS[group.size])
        before = group.sequence
        value = cc.vocab_parallel_log_softmax(shard, 0.7, tp_group=group)
        expect(group.sequence - before, int(group.size > 1), "messages of the forward")
        value.backward(upstream[:, start:end].to(value.dtype))
        expect(group.sequence - before, 2 * int(group.size > 1), "and of the backward")
        expect(value.dtype, torch.float64 if dtype == torch.float64 else torch.float32)
        close(expect, value.detach().exp(), expected[:, start:end].exp(), torch.float32, "probabilities")
        finite = expected[:, start:end].isfinite()
        close(expect, value.detach()[finite], expected[:, start:end][finite], torch.float32, "values")
        close(expect, shard.grad, gradient[:, start:end], dtype, "gradient")
    alone = logits.clone().requires_grad_()
    value = cc.vocab_parallel_log_softmax(alone, 0.7)
    value.backward(upstream.to(value.dtype))
    close(expect, alone.grad, gradient, dtype, "gradient without a group")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_soft_targets(group_of, size, expect, dtype):
    student, _ = draw(5, 96, 4.0, dtype)
    target = draw(5, 96, 4.0, dtype)[0].flip(-1).contiguous()
    target[1, :50] = -torch.inf  # no mass on a whole shard
    student[1, :50] = -torch.inf  # where the student may be impossible, too
    upstream = torch.linspace(-2, 2, 5)

    def cross_entropy(x):
        logq = torch.log_softmax(x, -1)
        p = torch.softmax(target.double(), -1)
        return -torch.where(p == 0, 0.0, p * logq).sum(-1)

    with torch.no_grad():
        expected = cross_entropy(student.double())
    q, p = torch.softmax(student.double(), -1), torch.softmax(target.double(), -1)
    gradient = (q - p) * upstream.double().unsqueeze(-1)
    for group in member_tests(group_of, size):
        shard, start, end = part(student, group, WIDTHS[group.size])
        other = part(target, group, WIDTHS[group.size])[0]
        before = group.sequence
        value = cc.DistributedCrossEntropy.apply(shard, other, group)
        value.backward(upstream.to(value.dtype))
        expect(group.sequence - before, 1, "one message, none in the backward")
        close(expect, value.detach(), expected, torch.float32, "values")
        close(expect, shard.grad, gradient[:, start:end], dtype, "gradient")
        expect(other.grad, None, "the target's gradient")
        bits = torch.frombuffer(bytearray(raw(value)), dtype=torch.uint8)
        everybodys = torch.empty(group.size, bits.numel(), dtype=torch.uint8)
        cc.all_gather(everybodys, bits, group)
        expect.that(bool((everybodys == bits).all()), "not the same bits on all ranks")
        expect(cc.DistributedCrossEntropy.apply(shard, other, group, True).requires_grad, False)


def test_a_student_that_excludes_what_the_target_wants(world, size, expect):
    student, target = torch.zeros(2, 16 * size), torch.zeros(2, 16 * size)
    student[0, 3] = -torch.inf
    shard, other = part(student, world)[0], part(target, world)[0]
    value = cc.DistributedCrossEntropy.apply(shard, other, world)
    expect(value[0].item(), float("inf"))
    close(expect, value[1:].detach(), torch.tensor([16.0 * size]).double().log(), torch.float32, "uniform")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_tokens_a_row(group_of, size, expect, dtype):
    logits, _ = draw(8, 96, 20.0, dtype)
    tokens = torch.randint(0, 96, (8, 5), generator=torch.Generator().manual_seed(1))
    tokens[2] = tokens[2, 0]  # one five times
    tokens[3, 1] = IGNORED
    tokens[4] = IGNORED
    upstream = torch.linspace(-2, 2, 40).view(8, 5)
    upstream[5] = torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0])  # adds up to nothing

    def gather(x, log):
        x = torch.log_softmax(x, -1) if log else x
        return torch.where(tokens == IGNORED, 0.0, x.gather(-1, tokens.clamp(min=0)))

    for log in (True, False):
        expected, (gradient,) = float64(lambda x, log=log: gather(x, log), logits, upstream=upstream)
        for group in member_tests(group_of, size):
            for chunk in (1, 3, 100):
                shard, start, end = part(logits, group, WIDTHS[group.size])
                before = group.sequence
                if log:
                    value = cc.ChunkedDistributedGatherLogprob.apply(shard, tokens, start, end, chunk, group)
                else:
                    value = cc.gather_logits_at_global_indices(
                        shard[None], tokens[None], group, vocab_start_index=start, vocab_end_index=end, chunk_size=chunk
                    )[0]
                value.backward(upstream)
                expect(group.sequence - before, int(log or group.size > 1), "one message, none in the backward")
                close(expect, value.detach(), expected, torch.float32, "values")
                close(expect, shard.grad, gradient[:, start:end], dtype, "gradient")


def test_tokens_that_nobody_owns(world, size, raises_everywhere, expect):
    shard = torch.zeros(2, 4, requires_grad=True)
    start, end = 4 * world.rank, 4 * world.rank + 4
    wrong = torch.tensor([[0, 4 * size], [0, 0]])
    if size > 1:
        with raises_everywhere(cc.ArgumentError, r"gather_logits_at_global_indices: global_indices holds \d+"):
            cc.gather_logits_at_global_indices(
                shard[None], wrong[None], world, vocab_start_index=start, vocab_end_index=end
            )
    with raises_everywhere(cc.ArgumentError, r"ChunkedDistributedGatherLogprob: .*holds"):
        cc.ChunkedDistributedGatherLogprob.apply(shard, wrong, start, end, 4, world)
    with raises_everywhere(cc.ShapeError, r"global_indices has shape \[3, 2\], expected \[2, 'K'\]"):
        cc.ChunkedDistributedGatherLogprob.apply(shard, torch.zeros(3, 2, dtype=torch.int64), start, end, 4, world)


def test_logits_of_tokens_with_context_parallelism(world, size, expect):
    """The sequence is split over all ranks, the vocabulary is not; 4 positions a rank, 3 tokens are missing."""
    positions = 4 * size
    logits = torch.arange(2.0 * positions * 7).view(2, positions, 7)
    tokens = (torch.arange(2 * (positions - 3) * 2) % 7).view(2, positions - 3, 2)
    mine = cc._get_tokens_on_this_cp_rank(logits, world.rank, size).requires_grad_()
    value = cc.gather_logits_at_global_indices(mine, tokens, cp_group=world, vocab_start_index=0, vocab_end_index=7)
    expect(value, logits[:, : positions - 3].gather(-1, tokens))
    value.sum().backward()
    whole = torch.zeros_like(logits)
    whole[:, : positions - 3].scatter_add_(-1, tokens, torch.ones(tokens.shape))
    expect(mine.grad, size * cc._get_tokens_on_this_cp_rank(whole, world.rank, size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_topk(group_of, size, expect, dtype):
    """Many ties: the lower token first, wherever the vocabulary is cut."""
    logits = (torch.arange(5 * 96).view(5, 96) * 37 % 11).to(dtype)
    logits[3] = -torch.inf
    logits[3, 90] = 1
    order = logits.argsort(dim=-1, descending=True, stable=True)
    for group in member_tests(group_of, size):
        shard, start, end = part(logits, group, WIDTHS[group.size])
        for k in (1, 5, 60, 200):
            before = group.sequence
            values, tokens = cc.distributed_vocab_topk(
                shard, k, group, vocab_start_index=start, vocab_end_index=end, chunk_size=2
            )
            expect(group.sequence - before, 1, "messages")
            expect(tokens, order[:, :k], f"k = {k}")
            expect(values, logits.gather(-1, order[:, :k]).to(values.dtype))
        before = group.sequence
        expect(cc.vocab_parallel_argmax(shard, tp_group=group), order[:, 0])
        expect(group.sequence - before, int(group.size > 1), "messages")
    expect(cc.vocab_parallel_argmax(logits), order[:, 0])


def test_padding_is_never_among_the_largest(world, size, expect):
    shard = torch.full((2, 5), 9.0)
    shard[:, :3] = torch.arange(3.0)
    values, tokens = cc.distributed_vocab_topk(
        shard, 2, world, vocab_start_index=3 * world.rank, vocab_end_index=3 * world.rank + 3
    )
    second = 5 if size > 1 else 1
    expect(tokens, torch.tensor([[2, second]] * 2))
    expect(values, torch.tensor([[2.0, 2.0 if size > 1 else 1.0]] * 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_shift_and_contiguous(world, size, rank, expect, dtype):
    length = 6
    whole = torch.arange(2 * size * length * 2, dtype=dtype).view(2, size * length, 2)
    mine = whole[:, rank * length : (rank + 1) * length].clone()
    shifted = torch.cat((whole[:, 1:], torch.full_like(whole[:, :1], -7)), 1)
    expect(cc.cp_shift_next(mine, world, fill=-7), shifted[:, rank * length : (rank + 1) * length])
    balanced = cc._get_tokens_on_this_cp_rank(whole, rank, size)
    before = world.sequence
    expect(cc.cp_load_balanced_to_contiguous(balanced, cp_group=world), mine)
    expect(world.sequence - before, int(size > 1), "messages")
    turned = cc.cp_load_balanced_to_contiguous(balanced.transpose(0, 1), cp_group=world, seq_dim=0)
    expect(turned, mine.transpose(0, 1))
    expect(cc.cp_shift_next(mine, fill=-7)[:, -1], torch.full((2, 2), -7, dtype=dtype))
    if dtype != torch.float32:
        return
    balanced.requires_grad_()
    weights = torch.cos(whole)
    own = weights[:, rank * length : (rank + 1) * length]
    (cc.cp_load_balanced_to_contiguous(balanced, cp_group=world) * own).sum().backward()
    expect(balanced.grad, cc._get_tokens_on_this_cp_rank(weights, rank, size))
    mine.requires_grad_()
    (cc.cp_shift_next(mine, world, fill=0.0) * own).sum().backward()
    from_before = torch.cat((torch.zeros_like(weights[:, :1]), weights[:, :-1]), 1)
    expect(mine.grad, from_before[:, rank * length : (rank + 1) * length])


def test_next_tokens(world, size, rank, expect, raises_everywhere):
    logits, _ = draw(2 * 8, 16 * size, 3.0)
    logits = logits.view(2, 8, 16 * size)
    tokens = torch.randint(0, 16 * size, (2, 8), generator=torch.Generator().manual_seed(3))
    expected = torch.log_softmax(logits.double(), -1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    shard = part(logits, world)[0]
    call = cc.get_next_token_logprobs_from_logits
    close(expect, call(tokens, shard, None, rank, world).detach(), expected, torch.float32, "split")
    close(
        expect, call(tokens, shard, vocab_parallel_group=world, chunk_size=3).detach(), expected, torch.float32, "chunk"
    )
    whole = logits.clone().requires_grad_()
    value = call(tokens, whole)
    close(expect, value.detach(), expected, torch.float32, "not split")
    value.sum().backward()
    expect.that(bool((whole.grad[:, -1] == 0).all()) and bool((whole.grad[:, 0] != 0).any()), "gradient")
    with raises_everywhere(cc.ArgumentError, "sampling_params is 'top-k', expected None"):
        call(tokens, shard, None, rank, world, None, "top-k")
    with raises_everywhere(cc.ArgumentError, f"vocab_parallel_rank is {size}, expected"):
        call(tokens, shard, None, size, world)


def test_outside(group_of, size, rank, expect):
    if size == 1:
        pytest.skip("needs 2 ranks")
    inside = group_of(range(1, size))
    mode = inside if inside is not None else "TEST_" + "_".join(map(str, range(1, size)))
    shard, tokens = torch.zeros(1, 2, 4), torch.zeros(1, 2, 1, dtype=torch.int64)
    bounds = {"vocab_start_index": 4 * rank - 4, "vocab_end_index": 4 * rank}
    results = [
        cc.vocab_parallel_log_softmax(shard, 1.0, tp_group=mode),
        cc.DistributedCrossEntropy.apply(shard, shard, mode),
        cc.gather_logits_at_global_indices(shard, tokens, mode, **bounds),
        cc.vocab_parallel_argmax(shard, tp_group=mode),
        cc.cp_shift_next(shard, mode, fill=0.0),
        cc.cp_load_balanced_to_contiguous(shard, cp_group=mode),
        *cc.distributed_vocab_topk(shard, 1, mode, **bounds),
    ]
    expect([result is None for result in results], [inside is None] * 8)
