"""Sequences: the shift by one token, padding, packed sequences, and sequences split over ranks."""

from __future__ import annotations

import re
import threading

import pytest
import torch
from logprob_ranks import DTYPES, meshed, on_mesh, on_ranks, reference, same_bits, sharded, within_tolerance

from cupy_coll import (
    AllGatherCPTensor,
    ArgumentError,
    DTypeError,
    MismatchError,
    ShapeError,
    _get_tokens_on_this_cp_rank,
    allgather_cp_sharded_tensor,
    from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs_packed_sequences,
)

pytestmark = pytest.mark.usefixtures("computed_by")

ROUNDING = {torch.float16: 2**-10, torch.bfloat16: 2**-7}  # of a gradient below 4 in size, once
NAN = float("nan")


def call(tokens, **options):
    return lambda shard, start, end, tp, cp=None: from_parallel_logits_to_logprobs(
        shard, tokens, start, end, tp, cp_group=cp, **options
    )


def packed(tokens, cu, seqlen, **options):
    return lambda shard, start, end, tp, cp=None: from_parallel_logits_to_logprobs_packed_sequences(
        shard, tokens, cu, seqlen, start, end, tp, cp_group=cp, **options
    )


def begins(lengths, dtype=torch.int32):
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def unpack(of_position, lengths, columns):
    """[T] -> [batch, columns]: each sequence's positions but the last, zeros after them."""
    rows, first = [], 0
    for length in lengths:
        used = of_position[first : first + max(length - 1, 0)][:columns]
        rows.append(torch.cat([used, used.new_zeros(columns - len(used))]))
        first += length
    return torch.stack(rows) if rows else of_position.new_zeros(0, columns)


def shifted(tokens, lengths):
    """[T] tokens -> what each position predicts, -100 at each sequence's end."""
    pieces = [torch.cat([t[1:], t.new_tensor([-100])]) if len(t) else t for t in tokens.split(lengths)]
    return torch.cat(pieces)


# ---------------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 20.0, 300.0, 1e4])
def test_tensor_and_context_parallel_against_float64(dtype, scale):
    torch.manual_seed(int(scale))
    batch, length, vocab = 2, 8, 112
    logits = (torch.randn(batch, length, vocab) * scale).to(dtype)
    tokens = torch.randint(0, vocab, (batch, length))
    tokens[1, 3] = -100
    upstream = torch.randn(batch, length - 1)
    expected = reference(logits[:, :-1], tokens[:, 1:])
    gradient = expected.gradient(upstream)
    for tp in (1, 2, 3, 4):
        for cp in (1, 2):
            for chunk_size in (None, 3):
                found = meshed(logits, tp, cp, call(tokens, chunk_size=chunk_size))
                assert within_tolerance(found.value, expected.logprob), (tp, cp)
                wrong = (found.gradient(upstream / cp)[:, :-1].double() - gradient).abs().max()
                assert wrong <= 1e-5 + ROUNDING.get(dtype, 0.0), (tp, cp, chunk_size)
                assert not any(shard.grad[:, -1].any() for shard in found.shards[:tp]), "the last position"
                assert found.calls == ({1}, {0 if cp == 1 else 2})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_packed_against_float64(dtype, scale):
    torch.manual_seed(int(scale))
    lengths, vocab, columns = [4, 0, 12, 8], 48, 8  # the third is longer than the rows
    total = sum(lengths)
    logits = (torch.randn(1, total, vocab) * scale).to(dtype)
    tokens = torch.randint(0, vocab, (1, total))
    tokens[0, 2] = -100
    expected = reference(logits[0], shifted(tokens[0], lengths))
    values = unpack(expected.logprob, lengths, columns)
    upstream = torch.randn(len(lengths), columns)
    gradient = torch.autograd.grad((values * upstream.double()).sum(), expected.logits)[0]
    for tp in (1, 2, 3, 4):
        for cp in (1, 2):
            for chunk_size in (None, 5):
                found = meshed(
                    logits, tp, cp, packed(tokens, begins(lengths), columns + 1, chunk_size=chunk_size), lengths
                )
                assert found.value.shape == (4, columns)
                assert within_tolerance(found.value, values.detach()), (tp, cp)
                assert not found.value[1].any()
                wrong = (found.gradient(upstream / cp)[0].double() - gradient).abs().max()
                assert wrong <= 1e-5 + ROUNDING.get(dtype, 0.0), (tp, cp, chunk_size)
                assert found.calls == ({1}, {0 if cp == 1 else 2}), "however many sequences"


@pytest.mark.parametrize("length", [0, 1, 2, 5, 7])
@pytest.mark.parametrize("cp", [1, 2])
def test_target_shorter_than_the_logits(length, cp):
    torch.manual_seed(length)
    logits, tokens = torch.randn(3, 8, 32), torch.randint(0, 32, (3, length))
    found = meshed(logits, 2, cp, call(tokens, chunk_size=2, temperature=0.5))
    count = max(length - 1, 0)
    assert found.value.shape == (3, count)
    expected = reference(logits[:, :count], tokens[:, 1:], 0.5)
    assert within_tolerance(found.value, expected.logprob)
    upstream = torch.randn(3, count)
    gradient = found.gradient(upstream / cp)
    torch.testing.assert_close(gradient[:, :count].double(), expected.gradient(upstream), atol=1e-6, rtol=1e-5)
    assert not gradient[:, count:].any()


@pytest.mark.on_kernels_too
def test_packed_closed_form():
    """Two sequences of 3 and 2 tokens: each is shifted by itself."""
    logits, tokens = torch.zeros(1, 5, 8), torch.tensor([[0, 1, 2, 4, 5]])
    logits[0, 0, 1], logits[0, 1, 2], logits[0, 3, 5] = 1, 2, 4
    for tp in (1, 2):
        found = meshed(logits, tp, 1, packed(tokens, begins([3, 2]), 3))
        assert found.value[0].tolist() == pytest.approx([-1.274009, -0.666468], abs=1e-6)
        assert found.value[1].tolist() == [pytest.approx(-0.120632, abs=1e-6), 0.0]
        gradient = found.gradient(torch.ones(2, 2))
        assert not gradient[0, [2, 4]].any()
        assert gradient[0, [0, 1, 3]].any(-1).all()
        other = tokens.clone()
        other[0, 3] = 7
        assert same_bits(meshed(logits, tp, 1, packed(other, begins([3, 2]), 3)).value[0], found.value[0])


@pytest.mark.on_kernels_too
def test_context_parallel_closed_form():
    logits = torch.zeros(1, 8, 8)
    for i in range(7):
        logits[0, i, i + 1] = i
    tokens = torch.arange(8).view(1, 8)
    wanted = [-2.079442, -1.274009, -0.666468, -0.299000, -0.120632, -0.046087, -0.017202]
    for found in (
        meshed(logits, 2, 2, call(tokens)),
        meshed(logits, 2, 2, packed(tokens, begins([8]), 8)),
        meshed(logits, 1, 1, call(tokens)),
    ):
        assert found.value[0].tolist() == pytest.approx(wanted, abs=1e-6)
        assert not found.gradient(torch.ones(1, 7))[0, -1].any()


@pytest.mark.parametrize("chunk_size", [None, 1, 2, 3, 5, 7])
def test_packed_sequences_that_nobody_can_split(chunk_size):
    """Odd lengths, sequences of one token and of none, rows shorter and longer than all."""
    torch.manual_seed(3)
    lengths = [0, 1, 5, 0, 2, 1, 7, 0]
    logits, tokens = torch.randn(1, 16, 32), torch.randint(0, 32, (1, 16))
    expected = reference(logits[0], shifted(tokens[0], lengths))
    for seqlen in (0, 1, 2, 4, 7, 12):
        columns = max(seqlen - 1, 0)
        found = meshed(logits, 2, 1, packed(tokens, begins(lengths, torch.int64), seqlen, chunk_size=chunk_size))
        values = unpack(expected.logprob, lengths, columns)
        assert within_tolerance(found.value, values.detach())
        upstream = torch.randn(8, columns)
        gradient = torch.autograd.grad((values * upstream.double()).sum(), expected.logits, retain_graph=True)[0]
        torch.testing.assert_close(found.gradient(upstream)[0].double(), gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_nothing_packed(tp, cp):
    found = meshed(torch.zeros(1, 0, 8), tp, cp, packed(torch.zeros(1, 0, dtype=torch.int64), begins([0, 0]), 4), [])
    assert found.value.tolist() == [[0.0] * 3] * 2
    assert found.gradient(torch.ones(2, 3)).shape == (1, 0, 8)
    no_sequence = meshed(torch.zeros(1, 0, 8), tp, cp, packed(torch.zeros(1, 0, dtype=torch.int64), begins([]), 4), [])
    assert no_sequence.value.shape == (0, 3)


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_target_that_is_shifted_and_split_already(cp, dtype):
    torch.manual_seed(4)
    lengths = [4, 0, 8]
    logits, tokens = torch.randn(1, 12, 32), torch.randint(0, 32, (1, 12), dtype=dtype)
    plain = meshed(logits, 2, cp, packed(tokens, begins(lengths), 7), lengths)
    rolled = torch.cat([t.roll(-1) for t in tokens[0].split(lengths)])
    rolled[[3, 11]] = 99  # nobody's token: counts for nothing at a sequence's end

    def pre_rolled(shard, start, end, tp_group, cp_group):
        order = [*found_order[cp_group.rank]]
        return from_parallel_logits_to_logprobs_packed_sequences(
            shard, rolled[None, order], begins(lengths), 7, start, end, tp_group, False, cp_group, None, True
        )

    found_order = {1: [list(range(12))], 2: [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]}[cp]
    found = meshed(logits, 2, cp, pre_rolled, lengths)
    assert same_bits(found.value, plain.value)
    upstream = torch.randn(3, 6)
    assert same_bits(found.gradient(upstream), plain.gradient(upstream))


@pytest.mark.on_kernels_too
@pytest.mark.parametrize("temperature", [0.25, 1.7])
def test_temperature_of_packed_sequences(temperature):
    torch.manual_seed(5)
    logits, tokens = torch.randn(1, 8, 32) * 5, torch.randint(0, 32, (1, 8))
    expected = reference(logits[0], shifted(tokens[0], [8]), temperature)
    found = meshed(logits, 2, 2, packed(tokens, begins([8]), 8, temperature=temperature))
    assert within_tolerance(found.value[0], expected.logprob[:-1].detach())


def test_first_token_is_nobodys_target():
    tokens = torch.tensor([[999, 1, 2, 3]])
    for value in (
        meshed(torch.zeros(1, 4, 8), 2, 2, call(tokens)).value,
        meshed(torch.zeros(1, 4, 8), 2, 2, packed(tokens, begins([4]), 4)).value,
    ):
        torch.testing.assert_close(value, torch.full((1, 3), 8.0).log().neg())


def test_inference_only():
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    for make in (call(tokens, inference_only=True), packed(tokens, begins([4]), 4, inference_only=True)):
        assert not meshed(torch.zeros(1, 4, 8), 2, 2, make).value.requires_grad


@pytest.mark.parametrize("cp", [1, 2])
def test_logits_and_gradients_of_any_layout(cp):
    torch.manual_seed(6)
    base, tokens = torch.randn(8, 3, 40), torch.randint(0, 32, (3, 8))
    for view in (
        base.transpose(0, 1)[..., :32],
        base[:, :1].transpose(0, 1).expand(3, 8, 40)[..., 4:36],
        base.permute(1, 0, 2).contiguous()[..., 8:],
    ):
        expected = reference(view[:, :-1], tokens[:, 1:])
        for upstream in (torch.tensor(2.0).expand(3, 7), torch.randn(7, 3).t(), torch.randn(3, 14)[:, ::2]):
            gradient = expected.gradient(upstream)
            parts = {1: [list(range(8))], 2: [[0, 1, 6, 7], [2, 3, 4, 5]]}[cp]
            shards = [view[:, positions] if cp > 1 else view for positions in parts]
            shards = [shard.detach().requires_grad_() for shard in shards]

            def work(tp_group, cp_group, shards=shards, upstream=upstream):
                value = call(tokens)(shards[cp_group.rank], 0, 32, tp_group, cp_group)
                (mine,) = torch.autograd.grad(value, shards[cp_group.rank], upstream)
                return value.detach(), mine

            for positions, [(value, mine)] in zip(parts, on_mesh(1, cp, work), strict=True):
                assert within_tolerance(value, expected.logprob)
                inner = [i for i, p in enumerate(positions) if p < 7]
                torch.testing.assert_close(
                    mine[:, inner].double() / cp, gradient[:, [positions[i] for i in inner]], atol=1e-6, rtol=1e-5
                )


# ---------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_same_bits_packed_or_not_and_for_any_split(dtype):
    torch.manual_seed(7)
    lengths, vocab = [16, 4, 32, 12], 16 * 33
    logits = (torch.randn(1, 64, vocab) * 4).to(dtype)
    tokens, upstream = torch.randint(0, vocab, (1, 64)), torch.randn(4, 31)
    whole = meshed(logits, 1, 1, packed(tokens, begins(lengths), 32), lengths)
    value, gradient = whole.value, whole.gradient(upstream)
    for tp, cp, chunk_size in ((1, 1, 7), (1, 2, None), (2, 1, None), (2, 2, 3), (4, 1, 1), (4, 2, None), (8, 1, 64)):
        found = meshed(logits, tp, cp, packed(tokens, begins(lengths), 32, chunk_size=chunk_size), lengths)
        assert same_bits(found.value, value), (tp, cp)
        # what each rank adds is exact: a half of the gradient, twice
        assert same_bits(found.gradient(upstream / cp), gradient), (tp, cp)
    first = 0
    for row, length in enumerate(lengths):
        one, own = logits[:, first : first + length], tokens[:, first : first + length]
        for tp, cp in ((1, 1), (2, 2)):
            alone = meshed(one, tp, cp, call(own))
            assert same_bits(alone.value[0], value[row, : length - 1])
            own_gradient = alone.gradient(upstream[row : row + 1, : length - 1] / cp)
            assert same_bits(own_gradient[0], gradient[0, first : first + length])
        first += length


# ---------------------------------------------------------------------- context parallelism by itself


@pytest.mark.on_torch
def test_tokens_on_this_rank():
    tokens = torch.arange(16).view(2, 8)
    assert _get_tokens_on_this_cp_rank(tokens, 0, 2).tolist() == [[0, 1, 6, 7], [8, 9, 14, 15]]
    assert _get_tokens_on_this_cp_rank(tokens, 1, 2).tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert _get_tokens_on_this_cp_rank(tokens.t(), 1, 2, seq_dim=0).tolist() == [[2, 10], [3, 11], [4, 12], [5, 13]]
    assert torch.equal(_get_tokens_on_this_cp_rank(tokens.t(), 1, 2, -2), _get_tokens_on_this_cp_rank(tokens, 1, 2).t())
    odd = torch.arange(3).view(1, 3)
    assert _get_tokens_on_this_cp_rank(odd, 0, 1).tolist() == [[0, 1, 2]]
    assert _get_tokens_on_this_cp_rank(tokens[:, :0], 1, 2).shape == (2, 0)


@pytest.mark.on_torch
@pytest.mark.parametrize("cp", [1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_gather_of_context_parallel_tensors(cp, dim, dtype):
    torch.manual_seed(8)
    whole = torch.randn(12, 12, 12).mul(10).to(dtype)
    upstream = [torch.randint(-4, 4, (12, 12, 12)).to(dtype).transpose(0, 2) for _ in range(cp)]

    def work(_, group):
        mine = _get_tokens_on_this_cp_rank(whole, group.rank, cp, dim)
        if dtype == torch.int64:
            return allgather_cp_sharded_tensor(mine, group, dim), None, group.calls
        mine.requires_grad_()
        gathered = AllGatherCPTensor.apply(mine, group, dim)
        (gradient,) = torch.autograd.grad(gathered, mine, upstream[group.rank])
        return gathered, gradient, group.calls

    for rank, [(gathered, gradient, calls)] in enumerate(on_mesh(1, cp, work)):
        assert same_bits(gathered, whole)
        if gradient is None:
            continue
        assert same_bits(gradient, _get_tokens_on_this_cp_rank(sum(upstream), rank, cp, dim))
        assert calls == (0 if cp == 1 else 2)


@pytest.mark.on_torch
def test_gather_without_a_group():
    tensor = torch.arange(3.0).view(1, 3).requires_grad_()
    gathered = allgather_cp_sharded_tensor(tensor, None)
    assert torch.equal(gathered, tensor)
    gathered.sum().backward()
    assert tensor.grad.tolist() == [[1.0] * 3]


# ---------------------------------------------------------------------- what is refused

LOGITS, TOKENS = torch.zeros(1, 4, 8), torch.zeros(1, 8, dtype=torch.int64)


def raised(work, tp=1, cp=2):
    """Every rank's error, and how many messages were sent."""
    groups, lock = [], threading.Lock()

    def recorded(tp_group, cp_group):
        with lock:
            groups.extend([tp_group, cp_group])
        return work(tp_group, cp_group)

    errors = [error for row in on_mesh(tp, cp, recorded, errors=True) for error in row]
    assert all(isinstance(error, Exception) and not isinstance(error, TimeoutError) for error in errors), errors
    return errors, sum(group.calls for group in groups)


@pytest.mark.on_torch
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"cu": [0, 8]}, ArgumentError, "cu_seqlens_padded is a list"),
        ({"cu": torch.tensor([0.0, 8.0])}, DTypeError, "cu_seqlens_padded has dtype torch.float32"),
        ({"cu": torch.tensor([[0, 8]])}, ShapeError, r"cu_seqlens_padded has shape \[1, 2\], expected \[batch \+ 1\]"),
        ({"cu": torch.tensor([], dtype=torch.int64)}, ShapeError, r"has shape \[0\]"),
        ({"cu": torch.tensor([4, 8])}, ArgumentError, "goes from 4 to 8, expected 0 to the 8 packed tokens"),
        ({"cu": torch.tensor([0, 4])}, ArgumentError, "goes from 0 to 4, expected 0 to the 8"),
        ({"cu": torch.tensor([0, 12, 4, 8])}, ArgumentError, r"sequence 1 the length -8 \(from 12 to 4\)"),
        ({"cu": torch.tensor([0, 4, 6, 8])}, ArgumentError, "sequence 1 the length 2 .* a multiple of 2 x 2 .* = 4"),
        ({"seqlen": -1}, ArgumentError, "unpacked_seqlen is -1"),
        ({"seqlen": 2.5}, ArgumentError, "unpacked_seqlen is 2.5, expected an integer"),
        ({"chunk_size": 0}, ArgumentError, "chunk_size is 0"),
        ({"chunk_size": -1}, ArgumentError, "chunk_size is -1"),
        ({"temperature": 0.0}, ArgumentError, "temperature is 0.0"),
        ({"tokens": TOKENS[0]}, ShapeError, r"target has shape \[8\], expected \[1, 8\]"),
        ({"tokens": TOKENS[:, :7]}, ShapeError, r"target has shape \[1, 7\], expected \[1, 8\] \(2 context-parallel"),
        ({"target_is_pre_rolled": True}, ShapeError, r"target has shape \[1, 8\], expected \[1, 4\]"),
        ({"tokens": TOKENS.float()}, DTypeError, "target has dtype"),
        ({"logits": torch.zeros(2, 4, 8)}, ShapeError, r"vocab_parallel_logits has shape \[2, 4, 8\]"),
        ({"logits": torch.zeros(4, 8)}, ShapeError, r"expected \[1, packed tokens, vocabulary / ranks\]"),
    ],
)
def test_packed_arguments_are_refused_before_anything_is_sent(arguments, error, words):
    arguments = {"logits": LOGITS, "tokens": TOKENS, "cu": torch.tensor([0, 8]), "seqlen": 8, **arguments}
    logits = arguments.pop("logits")
    make = packed(arguments.pop("tokens"), arguments.pop("cu"), arguments.pop("seqlen"), **arguments)
    errors, calls = raised(lambda tp, cp: make(logits, 0, 8, tp, cp))
    for one in errors:
        assert type(one) is error
        assert re.match(f"from_parallel_logits_to_logprobs_packed_sequences: .*{words}", str(one)), str(one)
    assert calls == 0


@pytest.mark.on_torch
@pytest.mark.parametrize(
    ("logits", "tokens", "error", "words"),
    [
        (
            LOGITS,
            torch.zeros(1, 9, dtype=torch.int64),
            ShapeError,
            "target has 9 tokens, expected at most the 8 .* of 2",
        ),
        (LOGITS[:, :3], TOKENS[:, :6], ShapeError, "expected dimension 1 to be even"),
        (LOGITS, TOKENS.expand(2, 8), ShapeError, "with the batch 1"),
    ],
)
def test_split_sequences_are_refused_before_anything_is_sent(logits, tokens, error, words):
    errors, calls = raised(lambda tp, cp: call(tokens)(logits, 0, 8, tp, cp))
    for one in errors:
        assert type(one) is error
        assert re.match(f"from_parallel_logits_to_logprobs: .*{words}", str(one)), str(one)
    assert calls == 0


@pytest.mark.on_torch
@pytest.mark.parametrize(
    ("work", "error", "words"),
    [
        (lambda group: AllGatherCPTensor.apply(LOGITS[:, :3], group), ShapeError, "expected dimension 1 to be even"),
        (lambda group: AllGatherCPTensor.apply(LOGITS, group, 3), ArgumentError, "seq_dim is 3, expected a dimension"),
        (lambda group: AllGatherCPTensor.apply([1], group), ArgumentError, "tensor is a list"),
        (
            lambda _: _get_tokens_on_this_cp_rank(TOKENS[:, :6], 0, 2),
            ShapeError,
            "a multiple of 2 x 2 ranks = 4, got 6",
        ),
        (lambda _: _get_tokens_on_this_cp_rank(TOKENS, 2, 2), ArgumentError, "cp_rank is 2, expected 0 to 1"),
        (lambda _: _get_tokens_on_this_cp_rank(TOKENS, 0, 0), ArgumentError, "cp_size is 0"),
        (lambda _: _get_tokens_on_this_cp_rank(TOKENS, 0, 2, -3), ArgumentError, "seq_dim is -3"),
    ],
)
def test_tensors_that_cannot_be_split(work, error, words):
    errors, calls = raised(lambda _, cp: work(cp))
    assert all(type(one) is error and re.search(words, str(one)) for one in errors), errors
    assert calls == 0


@pytest.mark.on_torch
@pytest.mark.parametrize("position", [1, 4])
@pytest.mark.parametrize("packing", [False, True])
def test_target_that_nobody_owns_raises_on_all_context_parallel_ranks(position, packing):
    """Only the ranks that hold the position see it; the others must not wait for them."""
    tokens = TOKENS.clone()
    tokens[0, position] = 77
    make = packed(tokens, torch.tensor([0, 8]), 8) if packing else call(tokens)
    errors, _ = raised(lambda tp, cp: make(LOGITS, 8 * tp.rank, 8 * tp.rank + 8, tp, cp), tp=2)
    assert [type(one) for one in errors] == [ArgumentError] * 4
    holder = 1 if position == 4 else 0  # of the position before it
    for c, one in enumerate([errors[:2], errors[2:]]):
        wanted = "target holds 77, expected -100" if c == holder else f"rank {holder} of cp_group .* the error there"
        assert all(re.search(wanted, str(error)) for error in one), errors


@pytest.mark.on_torch
def test_ranges_that_do_not_fit_raise_on_all_context_parallel_ranks():
    """The ranges have a gap on the second context-parallel rank only."""

    def work(tp, cp):
        start = 8 * tp.rank + (cp.rank if tp.rank == 1 else 0)
        return call(TOKENS)(LOGITS, start, start + 8, tp, cp)

    errors, _ = raised(work, tp=2)
    assert [type(one) for one in errors] == [MismatchError] * 4
    assert "a gap" in str(errors[2])


@pytest.mark.on_torch
def test_one_context_parallel_rank_is_none():
    logits = torch.zeros(1, 3, 8)
    for group in (None, "own"):
        value = on_ranks(1, lambda g, c=group: call(TOKENS[:, :3])(logits, 0, 8, g, g if c else None))[0]
        assert value.shape == (1, 2)


@pytest.mark.on_torch
def test_sharded_helper_still_gives_one_message():
    found = sharded(torch.zeros(1, 3, 8), 2, call(TOKENS[:, :3]))
    assert [group.calls for group in found.groups] == [1, 1]
