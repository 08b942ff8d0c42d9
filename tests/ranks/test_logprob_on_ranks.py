"""Log-probabilities and entropy of logits whose vocabulary is split over real ranks."""

from __future__ import annotations

import pytest
import torch

import cupy_coll as cc
from cupy_coll import (
    AllGatherCPTensor,
    ArgumentError,
    ChunkedDistributedEntropy,
    ChunkedDistributedLogprob,
    DistributedLogprob,
    MismatchError,
    ShapeError,
    _compute_distributed_log_softmax,
    _get_tokens_on_this_cp_rank,
    allgather_cp_sharded_tensor,
    from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs_packed_sequences,
    vocab_parallel_logprob_and_entropy,
)

INF = float("inf")
IGNORED = -100


def part(logits, group, widths=None):
    """This rank's columns as a leaf that requires grad, and their range."""
    vocab = logits.shape[-1]
    widths = [vocab // group.size] * group.size if widths is None else widths
    assert sum(widths) == vocab
    start = sum(widths[: group.rank])
    end = start + widths[group.rank]
    return logits[..., start:end].clone().requires_grad_(), start, end


def draw(rows, vocab, scale=3.0, dtype=torch.float32):
    """The same on every rank."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(rows, vocab, generator=generator) * scale).to(dtype)
    return logits, torch.randint(0, vocab, (rows,), generator=generator)


def reference(logits, target, upstream):
    """Log-probability and gradient in float64, unsharded."""
    wide = logits.detach().double().requires_grad_()
    picked = torch.log_softmax(wide, -1).gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    value = torch.where(target == IGNORED, 0.0, picked)
    return value.detach(), torch.autograd.grad(value, wide, upstream.double())[0]


def alone(group_of, rank, size):
    """A group of this rank only."""
    return [group_of([other]) for other in range(size)][rank]


def raw(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def member_tests(group_of, size):
    """Groups of 1 to all ranks that this rank is in; all ranks make them."""
    made = [group_of(range(size - count, size)) for count in range(1, size + 1)]
    return [group for group in made if group is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_values_gradients_and_messages(group_of, rank, size, share, expect, dtype):
    widths = {1: [960], 2: [480, 480], 3: [500, 0, 460], 4: [240] * 4}
    rounding = {torch.float16: 2**-10, torch.bfloat16: 2**-7}.get(dtype, 0.0)
    for scale in (1.0, 300.0):
        logits, target = draw(12, 960, scale, dtype)
        target[3] = IGNORED
        upstream = torch.linspace(-2, 2, 12)
        expected, gradient = reference(logits, target, upstream)
        for group in member_tests(group_of, size):
            shard, start, end = part(logits, group, widths[group.size])
            before = group.sequence
            value = DistributedLogprob.apply(shard, target, start, end, group)
            expect(group.sequence - before, 1, "messages of the forward")
            expect(value.detach().double(), expected, f"{group.name} {scale}", rtol=1e-5, atol=1e-6)
            value.backward(upstream.to(value.dtype))
            expect(group.sequence - before, 1, "messages of forward and backward")
            wrong = (shard.grad.double() - gradient[:, start:end]).abs().max().item() if end > start else 0.0
            expect.that(wrong <= 1e-5 + rounding, f"{group.name} {scale}: gradient off by {wrong}")
        everyone = share(raw(value) if rank == size - 1 or group.size == size else None)
        expect.that(len({one for one in everyone if one is not None}) == 1, "bits differ between ranks")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_for_any_rows_chunk_and_tensor_parallel_size(group_of, rank, size, expect, dtype):
    logits, target = draw(64, 16 * 501, dtype=dtype)
    upstream = torch.linspace(-1, 1, 64)
    single = alone(group_of, rank, size)
    whole, start, end = part(logits, single)
    value = DistributedLogprob.apply(whole, target, start, end, single)
    value.backward(upstream)
    for count in (2, 4):
        if count > size:
            continue
        group = group_of(range(size - count, size))
        if group is None:
            continue
        for rows in (1, 3, 64):
            for chunk in (None, 1, 7):
                shard, start, end = part(logits[:rows], group)
                if chunk is None:
                    found = DistributedLogprob.apply(shard, target[:rows], start, end, group)
                else:
                    found = ChunkedDistributedLogprob.apply(shard, target[:rows], start, end, chunk, group)
                label = f"tp {count}, {rows} rows, chunk {chunk}"
                expect(found.detach(), value[:rows].detach(), label)
                found.backward(upstream[:rows])
                expect(shard.grad, whole.grad[:rows, start:end], f"gradient of {label}")


def test_sequences_and_chunks(world, expect):
    logits, _ = draw(2 * 5, 8 * world.size)
    logits = logits.view(2, 5, -1)
    tokens = torch.arange(10).view(2, 5) % logits.shape[-1]
    upstream = torch.linspace(1, 2, 8).view(2, 4)
    value, gradient = reference(logits[:, :-1], tokens[:, 1:], upstream)
    for chunk in (None, 1, 2, 3, 5, 7):
        for length in (5, 3):  # of the target: the logits' other positions are padding
            shard, start, end = part(logits, world)
            before = world.sequence
            found = from_parallel_logits_to_logprobs(shard, tokens[:, :length], start, end, world, chunk_size=chunk)
            expect(found.detach().double(), value[:, : length - 1], f"chunk {chunk}", rtol=1e-5, atol=1e-6)
            found.backward(upstream[:, : length - 1])
            expect(world.sequence - before, 1, "messages")
            used = shard.grad[:, : length - 1].double()
            expect(used, gradient[:, : length - 1, start:end], f"gradient, chunk {chunk}", rtol=1e-5, atol=1e-6)
            expect.that(not shard.grad[:, length - 1 :].any(), "gradient of the last position and of padding")


def test_closed_forms_on_two_ranks(group_of, rank, size, expect):
    group = group_of.of(2)
    if group is None:
        return

    def run(logits, target, upstream=None):
        logits = torch.tensor([logits]).expand(len(target), -1)
        shard, start, end = part(logits, group)
        value = DistributedLogprob.apply(shard, torch.tensor(target), start, end, group)
        value.backward(torch.ones(len(target)) if upstream is None else torch.tensor(upstream))
        return value.detach(), shard.grad

    value, _ = run([-INF] * 5 + [10.0] + [-INF] * 2, [5])
    expect(value, torch.tensor([0.0]), "certain")

    value, gradient = run([1.0, 2.0, -INF, -INF], [0, 1, 2], [0.0, 1.0, 0.0])
    expect(value, torch.tensor([-1.313262, -0.313262, -INF]), "a shard of -inf", atol=1e-6)
    wanted = [[-0.268941, 0.268941], [0.0, 0.0]][group.rank]
    expect(gradient[1], torch.tensor(wanted), "gradient beside a shard of -inf", atol=1e-6)

    value, _ = run([-INF] * 4, [1])
    expect.that(value.isnan().all(), "all -inf: NaN, as unsharded")

    value, gradient = run([0.0, 1.0, 2.0, 3.0], [3, IGNORED])
    expect(value, torch.tensor([-0.440190, 0.0]), "ignored", atol=1e-6)
    wanted = [[-0.032059, -0.087144], [-0.236883, 0.356086]][group.rank]
    expect(gradient, torch.tensor([wanted, [0.0, 0.0]]), "gradient of an ignored row", atol=1e-6)

    value, gradient = run([0.0, 1.0, float("nan"), 3.0], [0])
    expect.that(value.isnan().all() and gradient.isnan().all(), "NaN in one shard is NaN on all")

    logits = torch.zeros(1, 1024, dtype=torch.bfloat16)
    logits[0, 0] = 8
    shard, start, end = part(logits.expand(2, -1), group)
    value = DistributedLogprob.apply(shard, torch.tensor([0, 1]), start, end, group)
    expect(value.detach(), torch.tensor([-0.295039, -8.295039]), "bf16", atol=1e-5)


def test_entropy_and_log_softmax(world, expect):
    logits, target = draw(6, 48 * world.size)
    logits[2, ::3] = -INF
    target[2] = 1
    logs = torch.log_softmax(logits.double(), -1)
    entropy = -(torch.where(logs == -INF, 0.0, logs) * logs.exp()).sum(-1)
    shard, start, end = part(logits, world)
    before = world.sequence
    logprob, found = vocab_parallel_logprob_and_entropy(
        shard, target, world, vocab_start_index=start, vocab_end_index=end
    )
    (logprob.sum() + found.sum()).backward()
    expect(world.sequence - before, 1, "messages")
    expect(found.detach().double(), entropy, "entropy", rtol=1e-5, atol=1e-6)
    wanted = logs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    expect(logprob.detach().double(), wanted, "log-probability", rtol=1e-5, atol=1e-6)
    expect.that(shard.grad.isfinite().all(), "gradient beside -inf")
    negative = ChunkedDistributedEntropy.apply(shard, 2, world)
    expect(negative.detach().double(), -entropy, "negative entropy", rtol=1e-5, atol=1e-6)
    columns = _compute_distributed_log_softmax(shard, world)
    expect(columns.double(), logs[:, start:end], "log-softmax", rtol=1e-5, atol=1e-6)


def test_padding_columns(world, expect):
    """The last rank's shard is padded to the width of the others."""
    vocab = 4 * world.size - 1
    logits, target = draw(5, vocab)
    upstream = torch.ones(5)
    value, gradient = reference(logits, target, upstream)
    padded = torch.cat([logits, torch.full((5, 1), INF)], -1)
    shard, start, end = part(padded, world)
    end = min(end, vocab)
    found = DistributedLogprob.apply(shard, target, start, end, world)
    found.backward(upstream)
    expect(found.detach().double(), value, "value", rtol=1e-5, atol=1e-6)
    expect(shard.grad[:, : end - start].double(), gradient[:, start:end], "gradient", rtol=1e-5, atol=1e-6)
    expect.that(not shard.grad[:, end - start :].any(), "gradient of padding")


def test_without_rows(world, expect):
    shard = torch.zeros(2, 0, 8, requires_grad=True)
    target = torch.zeros(2, 0, dtype=torch.int64)
    start = 8 * world.rank
    before = world.sequence
    value = DistributedLogprob.apply(shard, target, start, start + 8, world)
    value.sum().backward()
    expect(tuple(value.shape), (2, 0), "shape")
    expect(tuple(shard.grad.shape), (2, 0, 8), "gradient's shape")
    expect(world.sequence - before, 1, "every rank takes part")


def test_group_mode_and_rank_outside(group_of, rank, size, expect):
    logits, target = torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64)
    start = 8 * rank
    by_mode = DistributedLogprob.apply(logits, target, start, start + 8, cc.CommMode.GLOBAL)
    expect(by_mode, torch.full((3,), 8.0 * size).log().neg(), "mode", rtol=1e-6)
    expect(DistributedLogprob.apply(logits, target, start, start + 8, None), by_mode, "None is the global group")
    backwards = group_of(range(size - 1, -1, -1))
    start = 8 * backwards.rank
    expect(DistributedLogprob.apply(logits, target, start, start + 8, backwards), by_mode, "order of the group")
    cc.CommContext().init_group([0], mode="FIRST")
    first = "FIRST"  # as a mode: the Group is None outside, and None means the global group
    outside = [
        DistributedLogprob.apply(logits, target, 0, 8, first),
        ChunkedDistributedLogprob.apply(logits, target, 0, 8, 2, first),
        ChunkedDistributedEntropy.apply(logits, 2, first),
        _compute_distributed_log_softmax(logits, first),
        from_parallel_logits_to_logprobs(logits.view(1, 3, 8), target.view(1, 3), 0, 8, first),
        *vocab_parallel_logprob_and_entropy(logits, target, first, vocab_start_index=0, vocab_end_index=8),
    ]
    expect([one is None for one in outside], [rank != 0] * 7, "None outside, and only there")


def test_none_outside_the_tensor_parallel_group(no_context, rank, size, expect):
    """It is what init_group gave there: refused, where it would wait in the global group for ranks in another one."""
    context = cc.CommContext()
    context.init_distributed_env(timeout=20)
    group = context.init_group([0], "TENSOR_PARALLEL")
    logits, target = torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64)
    calls = [
        lambda: DistributedLogprob.apply(logits, target, 0, 8, group),
        lambda: _compute_distributed_log_softmax(logits, group),
    ]
    before = context.get_group("GLOBAL").sequence
    for call in calls:
        if rank == 0:
            expect(call() is None, False, "inside")
            continue
        with pytest.raises(
            cc.GroupError, match="the group is None, which means the global group, on a rank outside TENS"
        ):
            call()
    expect(context.get_group("GLOBAL").sequence, before, "messages")
    everybody = DistributedLogprob.apply(logits, target, 8 * rank, 8 * rank + 8, cc.CommMode.GLOBAL)
    expect(everybody, torch.full((3,), 8.0 * size).log().neg(), "all, by name", rtol=1e-6)


@pytest.mark.parametrize("bad", [-1, -101, 10**6])
def test_target_that_nobody_owns(world, raises_everywhere, bad):
    logits, start = torch.zeros(4, 8), 8 * world.rank
    target = torch.tensor([0, IGNORED, bad, 1])
    with raises_everywhere(ArgumentError, f"target holds {bad}, expected -100 or a token of the vocabulary"):
        DistributedLogprob.apply(logits, target, start, start + 8, world)


@pytest.mark.parametrize("fault", ["gap", "overlap", "order", "wider", "negative"])
def test_ranges_that_do_not_fit(world, raises_everywhere, fault):
    """Only the last rank's range is wrong; everybody says so."""
    last = world.size - 1
    start, end = 8 * world.rank, 8 * world.rank + 8
    error = MismatchError
    if fault == "order":
        start, end = 8 * (last - world.rank), 8 * (last - world.rank) + 8
        if last == 0:
            start, end = 8, 16
    elif world.rank == last:
        start, end = {
            "gap": (start + 1, end + 1),
            "overlap": (start - 1, end - 1),
            "wider": (start, end + 1),
            "negative": (end, start),
        }[fault]
    if fault in ("wider", "negative") or (fault == "overlap" and last == 0):
        error = ArgumentError
    with raises_everywhere(error, "DistributedLogprob: .*rank"):
        DistributedLogprob.apply(torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64), start, end, world)


def test_bad_arguments_before_anything_is_sent(world, raises_everywhere, expect):
    logits, target, start = torch.zeros(2, 3, 8), torch.zeros(2, 3, dtype=torch.int64), 8 * world.rank
    before = world.sequence
    for chunk in (0, -1):
        with raises_everywhere(ValueError, f"chunk_size is {chunk}"):
            ChunkedDistributedLogprob.apply(logits, target, start, start + 8, chunk, world)
        with raises_everywhere(ValueError, f"chunk_size is {chunk}"):
            from_parallel_logits_to_logprobs(logits, target, start, start + 8, world, chunk_size=chunk)
    with raises_everywhere(cc.DTypeError, "target has dtype torch.float32"):
        DistributedLogprob.apply(logits, target.float(), start, start + 8, world)
    with raises_everywhere(ShapeError, "target has shape"):
        DistributedLogprob.apply(logits, target[:1], start, start + 8, world)
    with raises_everywhere(ShapeError, "at most the 3 positions"):
        from_parallel_logits_to_logprobs(logits, torch.zeros(2, 4, dtype=torch.int64), start, start + 8, world)
    barriers = world.sequence - before  # one after each error: of the harness
    expect(barriers, 7, "messages")


# ---------------------------------------------------------------------- sequences split over ranks


def meshes(group_of, rank, size):
    """(tp, cp groups) of this rank for every way to arrange all ranks; all ranks make all groups."""
    for cp in range(1, size + 1):
        if size % cp:
            continue
        tp = size // cp
        rows = [group_of(range(c * tp, (c + 1) * tp)) for c in range(cp)]
        columns = [group_of(range(t, size, tp)) for t in range(tp)]
        yield rows[rank // tp], columns[rank % tp]


def order_of(lengths, cp, r):
    """The positions that a context-parallel rank holds, one sequence at a time."""
    order, first = [], 0
    for length in lengths:
        part = length // (2 * cp)
        positions = list(range(first, first + length))
        later = (2 * cp - 1 - r) * part
        order += positions if cp == 1 else positions[r * part : (r + 1) * part] + positions[later : later + part]
        first += length
    return order


def cut(logits, lengths, tp, cp):
    """This rank's positions and columns of logits [B, S, V], as a leaf."""
    return part(logits[:, order_of(lengths, cp.size, cp.rank)], tp)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_context_parallel_values_gradients_messages_and_bits(group_of, rank, size, share, expect, dtype, packing):
    vocab, seqlen = 16 * 36, 48
    lengths = [24, 0, 48, 24] if packing else [48]
    batch = 1 if packing else 2
    logits, tokens = draw(batch * sum(lengths), vocab, dtype=dtype)
    logits, tokens = logits.view(batch, -1, vocab), tokens.view(batch, -1)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    starts = cu[:-1].tolist()
    targets = tokens.roll(-1, 1)
    targets[:, [a + n - 1 for a, n in zip(starts, lengths, strict=True) if n]] = IGNORED
    value, _ = reference(logits, targets, torch.ones(targets.shape))
    upstream = torch.linspace(-2, 2, seqlen - 1).expand(len(lengths) if packing else batch, -1)
    if packing:
        wanted = torch.zeros(len(lengths), seqlen - 1, dtype=torch.float64)
        weights = torch.zeros(batch, sum(lengths))
        for row, (first, length) in enumerate(zip(starts, lengths, strict=True)):
            used = max(length - 1, 0)
            wanted[row, :used] = value[0, first : first + used]
            weights[0, first : first + used] = upstream[row, :used]
    else:
        wanted, weights = value[:, :-1], torch.cat([upstream, torch.zeros(batch, 1)], 1)
    _, gradient = reference(logits, targets, weights)
    rounding = 2**-7 if dtype == torch.bfloat16 else 0.0
    bits = set()
    for tp, cp in meshes(group_of, rank, size):
        for chunk in (None, 5):
            shard, start, end = cut(logits, lengths, tp, cp)
            before = tp.sequence, cp.sequence
            if packing:
                found = from_parallel_logits_to_logprobs_packed_sequences(
                    shard, tokens, cu, seqlen, start, end, tp, cp_group=cp, chunk_size=chunk
                )
            else:
                found = from_parallel_logits_to_logprobs(shard, tokens, start, end, tp, cp_group=cp, chunk_size=chunk)
            label = f"tp {tp.size}, cp {cp.size}, chunk {chunk}"
            expect(found.detach().double(), wanted, label, rtol=1e-5, atol=1e-6)
            found.backward(upstream / cp.size)
            mine = gradient[:, order_of(lengths, cp.size, cp.rank), start:end]
            wrong = (shard.grad.double() - mine).abs().max().item()
            expect.that(wrong <= 1e-5 + rounding, f"{label}: gradient off by {wrong}")
            messages = (tp.sequence - before[0], cp.sequence - before[1])
            if tp is cp:  # of one rank
                messages = (messages[0], 0)
            expect(messages, (1, 2 if cp.size > 1 else 0), f"{label}: messages over tp and cp, both ways")
            bits.add(raw(found) if tp.size != 3 else None)
    bits.discard(None)
    everyone = set().union(*share(bits))
    expect.that(len(everyone) <= 1, "bits differ between ranks, chunks or ways to split")


def test_context_parallel_order_in_closed_form(group_of, rank, size, expect):
    cp = group_of.of(2)
    tp = alone(group_of, rank, size)
    if cp is None:
        return
    logits = torch.zeros(1, 8, 8)
    for i in range(7):
        logits[0, i, i + 1] = i
    tokens = torch.arange(8).view(1, 8)
    mine = [[0, 1, 6, 7], [2, 3, 4, 5]][cp.rank]
    wanted = torch.tensor([[-2.079442, -1.274009, -0.666468, -0.299000, -0.120632, -0.046087, -0.017202]])
    for packing in (False, True):
        shard = logits[:, mine].requires_grad_()
        if packing:
            cu = torch.tensor([0, 8])
            found = from_parallel_logits_to_logprobs_packed_sequences(shard, tokens, cu, 8, 0, 8, tp, cp_group=cp)
            rolled = tokens.roll(-1, 1)[:, mine]
            again = from_parallel_logits_to_logprobs_packed_sequences(
                shard, rolled, cu, 8, 0, 8, tp, cp_group=cp, target_is_pre_rolled=True
            )
            expect(again.detach(), found.detach(), "pre-rolled")
        else:
            found = from_parallel_logits_to_logprobs(shard, tokens, 0, 8, tp, cp_group=cp)
        expect(found.detach(), wanted, "values", atol=1e-6)
        found.sum().backward()
        expect.that(not shard.grad[:, [i for i, p in enumerate(mine) if p == 7]].any(), "last row")
        expect.that(shard.grad[:, [i for i, p in enumerate(mine) if p < 7]].any(-1).all(), "other rows")


def test_packed_label_shift_in_closed_form(world, expect):
    vocab = 8 * world.size
    logits, tokens = torch.full((1, 5, vocab), -INF), torch.tensor([[0, 1, 2, 4, 5]])
    logits[..., :8] = 0
    logits[0, 0, 1], logits[0, 1, 2], logits[0, 3, 5] = 1, 2, 4
    cu = torch.tensor([0, 3, 5], dtype=torch.int32)
    shard, start, end = part(logits, world)
    found = from_parallel_logits_to_logprobs_packed_sequences(shard, tokens, cu, 3, start, end, world)
    expect(found.detach(), torch.tensor([[-1.274009, -0.666468], [-0.120632, 0.0]]), "values", atol=1e-6)
    found.sum().backward()
    expect.that(not shard.grad[0, [2, 4]].any(), "rows 2 and 4")
    tokens[0, 3] = 7
    other = from_parallel_logits_to_logprobs_packed_sequences(shard, tokens, cu, 3, start, end, world)
    expect(other[0].detach(), found[0].detach(), "the other sequence's token")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_gather_of_context_parallel_tensors(group_of, rank, size, expect, dtype):
    for ranks in group_of.several():
        group = group_of(ranks)
        if group is None:
            continue
        length = 4 * group.size
        whole = torch.arange(3 * length * 2).view(3, length, 2).to(dtype)
        mine = _get_tokens_on_this_cp_rank(whole, group.rank, group.size)
        expect(mine, whole[:, order_of([length], group.size, group.rank)], "this rank's parts")
        before = group.sequence
        expect(allgather_cp_sharded_tensor(mine, group), whole, "whole")
        if dtype != torch.int64:
            turned = mine.transpose(0, 1).detach().requires_grad_()  # not contiguous
            gathered = AllGatherCPTensor.apply(turned, group, 0)
            expect(gathered.detach(), whole.transpose(0, 1), "along dimension 0")
            (gathered * (group.rank + 1)).sum().backward()
            total = group.size * (group.size + 1) / 2
            expect(turned.grad, torch.full_like(turned, total), "gradients are summed")
        messages = 3 if dtype != torch.int64 else 1
        expect(group.sequence - before, messages if group.size > 1 else 0, "messages")


def test_bad_target_and_ranges_raise_on_all_context_parallel_ranks(group_of, rank, size, raises_everywhere):
    tokens = torch.zeros(1, 4 * size, dtype=torch.int64)
    tokens[0, 1] = 99
    logits = torch.zeros(1, 4, 8)
    tp, cp = alone(group_of, rank, size), group_of(range(size))
    with raises_everywhere(ArgumentError, "target holds 99" if rank == 0 else "rank 0 of cp_group"):
        from_parallel_logits_to_logprobs(logits, tokens, 0, 8, tp, cp_group=cp)
    cu = torch.tensor([0, 4 * size])
    with raises_everywhere(ArgumentError, "target holds 99" if rank == 0 else "rank 0 of cp_group"):
        from_parallel_logits_to_logprobs_packed_sequences(logits, tokens, cu, 4, 0, 8, tp, cp_group=cp)
    first = 1 if rank == size - 1 else 0
    words = "a gap" if first else f"rank {size - 1} of cp_group"
    with raises_everywhere(MismatchError, words):
        from_parallel_logits_to_logprobs(logits, tokens * 0, first, first + 8, tp, cp_group=cp)


def test_packings_that_cannot_be_split(group_of, rank, size, raises_everywhere, expect):
    tp, cp = alone(group_of, rank, size), group_of(range(size))
    tokens, logits = torch.zeros(1, 4 * size, dtype=torch.int64), torch.zeros(1, 4, 8)
    call = from_parallel_logits_to_logprobs_packed_sequences
    before = cp.sequence + tp.sequence if cp is not tp else cp.sequence
    bad = [[0, 4 * size - 2], [2, 4 * size], [0, 4 * size, 2, 4 * size], [0, 6 * size, 4 * size]]
    if size > 1:
        bad.append([0, 2, 4 * size])
    for cu in bad:
        with raises_everywhere(ArgumentError, "cu_seqlens_padded"):
            call(logits, tokens, torch.tensor(cu), 4, 0, 8, tp, cp_group=cp)
    with raises_everywhere(cc.DTypeError, "cu_seqlens_padded has dtype"):
        call(logits, tokens, torch.tensor([0.0, 4 * size]), 4, 0, 8, tp, cp_group=cp)
    if size > 1:
        with raises_everywhere(ShapeError, "to be even"):
            from_parallel_logits_to_logprobs(logits[:, :3], tokens[:, :3], 0, 8, tp, cp_group=cp)
    after = cp.sequence + tp.sequence if cp is not tp else cp.sequence
    expect(after - before, 0, "messages")


def test_mesh_and_ranks_outside(no_context, rank, size, expect):
    context = cc.CommContext()
    context.init_distributed_env(timeout=20)
    cp = 2 if size % 2 == 0 else 1
    groups = context.init_mesh(cp=cp, tp=size // cp)
    tokens = torch.arange(4 * cp).view(1, -1)
    start = 16 * groups["tp"].rank
    found = from_parallel_logits_to_logprobs(
        torch.zeros(1, 4, 16), tokens, start, start + 16, "TENSOR_PARALLEL", cp_group="CONTEXT_PARALLEL"
    )
    uniform = torch.full((1, 4 * cp - 1), 16.0 * groups["tp"].size).log().neg()
    expect(found, uniform, "modes", rtol=1e-6)
    context.init_group([0], mode="FIRST")
    cu = torch.tensor([0, 4])
    outside = [
        from_parallel_logits_to_logprobs(torch.zeros(1, 4, 8), tokens[:, :4], 0, 8, "FIRST"),
        from_parallel_logits_to_logprobs(torch.zeros(1, 4, 8), tokens[:, :4], 0, 8, "FIRST", cp_group="FIRST"),
        from_parallel_logits_to_logprobs_packed_sequences(torch.zeros(1, 4, 8), tokens[:, :4], cu, 4, 0, 8, "FIRST"),
        allgather_cp_sharded_tensor(torch.zeros(1, 4), "FIRST"),
    ]
    expect([one is None for one in outside], [rank != 0] * 4, "None outside, and only there")
