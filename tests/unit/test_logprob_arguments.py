"""What is refused, where, and with which words; and how the functions behave in autograd."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from logprob_ranks import on_ranks, ranges

import cupy_coll
from cupy_coll import (
    AllGatherCPTensor,
    ArgumentError,
    ChunkedDistributedEntropy,
    ChunkedDistributedLogprob,
    DistributedLogprob,
    DTypeError,
    MismatchError,
    ShapeError,
    _compute_distributed_log_softmax,
    from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs_packed_sequences,
    vocab_parallel_logprob_and_entropy,
)

LOGITS = torch.zeros(2, 3, 8)
TARGET = torch.zeros(2, 3, dtype=torch.int64)


def raised(call, size=1):
    """The error of each rank, and that nobody sent anything unless all did."""
    groups = []

    def work(group):
        groups.append(group)
        return call(group)

    errors = on_ranks(size, work, errors=True)
    assert all(isinstance(error, Exception) for error in errors), errors
    assert not any(isinstance(error, TimeoutError) for error in errors)
    calls = {group.calls for group in groups}
    assert len(calls) == 1
    return errors, calls.pop()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((LOGITS.long(), TARGET, 0, 8), DTypeError, "vocab_parallel_logits has dtype torch.int64"),
        ((LOGITS.numpy(), TARGET, 0, 8), ArgumentError, "vocab_parallel_logits is a ndarray"),
        ((torch.tensor(1.0), TARGET, 0, 8), ShapeError, "is a scalar"),
        ((LOGITS.to_sparse(), TARGET, 0, 8), ArgumentError, "a torch.sparse_coo tensor, expected a dense one"),
        ((LOGITS, TARGET.float(), 0, 8), DTypeError, "target has dtype torch.float32, expected int64 or int32"),
        ((LOGITS, TARGET.bool(), 0, 8), DTypeError, "target has dtype torch.bool"),
        ((LOGITS, TARGET.tolist(), 0, 8), ArgumentError, "target is a list"),
        ((LOGITS, TARGET[:, :2], 0, 8), ShapeError, r"target has shape \[2, 2\], expected \[2, 3\]"),
        ((LOGITS, TARGET.to("meta"), 0, 8), ArgumentError, "target is on meta, expected cpu"),
        ((LOGITS, TARGET, 0.5, 8), ArgumentError, "vocab_start_index is 0.5"),
        ((LOGITS, TARGET, 0, "8"), ArgumentError, "vocab_end_index is '8'"),
    ],
)
def test_what_one_rank_can_see_is_refused_before_anything_is_sent(arguments, error, words):
    logits, target, start, end = arguments
    for name, call in {
        "DistributedLogprob": lambda g: DistributedLogprob.apply(*arguments, g),
        "ChunkedDistributedLogprob": lambda g: ChunkedDistributedLogprob.apply(*arguments, 2, g),
        "vocab_parallel_logprob_and_entropy": lambda g: vocab_parallel_logprob_and_entropy(
            logits, target, g, vocab_start_index=start, vocab_end_index=end
        ),
    }.items():
        errors, calls = raised(call)
        assert type(errors[0]) is error
        assert re.match(f"{name}: .*{words}", str(errors[0])), str(errors[0])
        assert calls == 0


@pytest.mark.parametrize("chunk_size", [0, -1, 1.5, None])
def test_chunk_size_below_one(chunk_size):
    def sequences(group):
        from_parallel_logits_to_logprobs(
            LOGITS, TARGET, 0, 8, group, chunk_size=-3 if chunk_size is None else chunk_size
        )

    for call in (
        lambda g: ChunkedDistributedLogprob.apply(LOGITS, TARGET, 0, 8, chunk_size, g),
        lambda g: ChunkedDistributedEntropy.apply(LOGITS, chunk_size, g),
        sequences,
    ):
        errors, calls = raised(call)
        assert isinstance(errors[0], ArgumentError)
        assert isinstance(errors[0], ValueError)
        assert "chunk_size" in str(errors[0])
        assert calls == 0


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan"), "hot"])
def test_temperature_that_is_none(temperature):
    errors, calls = raised(lambda g: DistributedLogprob.apply(LOGITS, TARGET, 0, 8, g, temperature=temperature))
    assert isinstance(errors[0], ArgumentError)
    assert "temperature" in str(errors[0])
    assert calls == 0


@pytest.mark.parametrize(
    ("bounds", "error", "words"),
    [
        ([(0, 8), (9, 17)], MismatchError, "a gap: rank 1 begins at 9, expected 8"),
        ([(1, 9), (9, 17)], MismatchError, "a gap: rank 0 begins at 1, expected 0"),
        ([(0, 8), (7, 15)], MismatchError, "an overlap or a wrong order: rank 1 begins at 7"),
        ([(8, 16), (0, 8)], MismatchError, "rank 0 begins at 8, expected 0"),
        ([(0, 8), (0, 8)], MismatchError, "an overlap"),
        ([(0, 8), (8, 17)], ArgumentError, r"rank 1 of the group are \[8, 17\), .* at most the 8 columns"),
        ([(0, 8), (16, 8)], ArgumentError, r"rank 1 of the group are \[16, 8\)"),
        ([(-8, 0), (0, 8)], ArgumentError, r"rank 0 of the group are \[-8, 0\)"),
    ],
)
def test_ranges_that_do_not_fit_raise_alike_on_every_rank(bounds, error, words):
    for call in (
        lambda g: DistributedLogprob.apply(LOGITS, TARGET, *bounds[g.rank], g),
        lambda g: from_parallel_logits_to_logprobs(LOGITS, TARGET, *bounds[g.rank], g),
    ):
        errors, calls = raised(call, size=2)
        assert [type(e) for e in errors] == [error] * 2
        assert str(errors[0]) == str(errors[1])
        assert re.search(words, str(errors[0])), str(errors[0])
        assert calls == 1  # only the gathered message shows it, to everybody


@pytest.mark.parametrize("bad", [16, -1, -99, -101, 2**40])
def test_target_that_nobody_owns(bad):
    target = TARGET.clone()
    target[1, 2] = bad
    target[0, 0] = -100
    errors, _ = raised(lambda g: DistributedLogprob.apply(LOGITS, target, *ranges(16, 2)[g.rank], g), size=2)
    assert [type(e) for e in errors] == [ArgumentError] * 2
    assert f"target holds {bad}, expected -100 or a token of the vocabulary [0, 16)" in str(errors[0])
    assert "1 of 6 targets" in str(errors[0])


def test_target_in_the_padding_is_owned_by_nobody():
    errors, _ = raised(lambda g: DistributedLogprob.apply(LOGITS, TARGET + 7, 0, 7, g))
    assert isinstance(errors[0], ArgumentError)


@pytest.mark.parametrize(
    ("logits", "target", "error", "words"),
    [
        (LOGITS[0], TARGET, ShapeError, "expected 3 dimensions"),
        (LOGITS, TARGET[0], ShapeError, r"target has shape \[3\]"),
        (LOGITS, TARGET[:1], ShapeError, "with the batch 2"),
        (LOGITS, torch.zeros(2, 4, dtype=torch.int64), ShapeError, "target has 4 tokens, expected at most the 3"),
        (LOGITS, TARGET.float(), DTypeError, "target has dtype"),
        (LOGITS.int(), TARGET, DTypeError, "vocab_parallel_logits has dtype"),
    ],
)
def test_sequences_that_do_not_fit(logits, target, error, words):
    errors, calls = raised(lambda g: from_parallel_logits_to_logprobs(logits, target, 0, 8, g))
    assert type(errors[0]) is error
    assert re.match(f"from_parallel_logits_to_logprobs: .*{words}", str(errors[0])), str(errors[0])
    assert calls == 0


def test_signatures():
    def parameters(function):
        return [(p.name, p.default, p.kind == p.KEYWORD_ONLY) for p in inspect.signature(function).parameters.values()]

    none = inspect.Parameter.empty

    def plain(*names):
        return [(name, none, False) for name in names]

    temperature = ("temperature", 1.0, True)
    inference = ("inference_only", False, False)
    four = plain("vocab_parallel_logits", "target", "vocab_start_index", "vocab_end_index")
    assert parameters(DistributedLogprob.apply) == [*four, *plain("group"), inference, temperature]
    assert parameters(ChunkedDistributedLogprob.apply) == [
        *four, *plain("chunk_size", "tp_group"), inference, temperature,
    ]  # fmt: skip
    assert parameters(ChunkedDistributedEntropy.apply) == [
        *plain("vocab_parallel_logits", "chunk_size", "tp_group"), inference,
    ]  # fmt: skip
    assert parameters(_compute_distributed_log_softmax) == plain("vocab_parallel_logits", "group")
    assert parameters(from_parallel_logits_to_logprobs) == [
        *four, *plain("tp_group"), inference, ("cp_group", None, False), ("chunk_size", None, False), temperature,
    ]  # fmt: skip
    assert parameters(from_parallel_logits_to_logprobs_packed_sequences) == [
        *plain("vocab_parallel_logits", "target", "cu_seqlens_padded", "unpacked_seqlen"), *four[2:], *plain("group"),
        inference, ("cp_group", None, False), ("chunk_size", None, False), ("target_is_pre_rolled", False, False),
        temperature,
    ]  # fmt: skip
    assert parameters(AllGatherCPTensor.apply) == [*plain("tensor", "cp_group"), ("seq_dim", 1, False)]
    assert parameters(cupy_coll.allgather_cp_sharded_tensor) == [*plain("tensor", "cp_group"), ("seq_dim", 1, False)]
    assert parameters(cupy_coll._get_tokens_on_this_cp_rank) == [
        *plain("input_ids", "cp_rank", "cp_size"), ("seq_dim", 1, False),
    ]  # fmt: skip
    assert parameters(vocab_parallel_logprob_and_entropy) == [
        *plain("vocab_parallel_logits", "target", "group"),
        ("vocab_start_index", none, True), ("vocab_end_index", none, True), temperature,
        ("inplace_backward", False, True),
    ]  # fmt: skip
    assert parameters(cupy_coll.tp_invariant) == plain("vocab_size", "tp_size")


# ------------------------------------------------------------------ autograd


def apply(logits, *options):
    return on_ranks(1, lambda g: DistributedLogprob.apply(logits, TARGET, 0, 8, g, *options))[0]


def test_inference_only_saves_nothing_and_requires_no_grad():
    logits = LOGITS.clone().requires_grad_()
    saved = []

    def call(group):
        return saved_in_thread(saved, lambda: DistributedLogprob.apply(logits, TARGET, 0, 8, group, True))

    assert not on_ranks(1, call)[0].requires_grad
    assert saved == []


def saved_in_thread(saved, call):
    """Hooks are per thread."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        return call()


def test_saved_are_the_logits_and_numbers_of_rows():
    logits, saved = LOGITS.clone().requires_grad_(), []
    on_ranks(1, lambda g: saved_in_thread(saved, lambda: DistributedLogprob.apply(logits, TARGET, 0, 8, g)))
    assert [shape for shape in saved if len(shape) == 3] == [LOGITS.shape]
    assert sum(shape.numel() for shape in saved if len(shape) != 3) <= 4 * TARGET.numel()


def test_without_grad():
    logits = LOGITS.clone().requires_grad_()
    saved = []

    def call(group):
        with torch.no_grad():
            return saved_in_thread(saved, lambda: DistributedLogprob.apply(logits, TARGET, 0, 8, group))

    assert not on_ranks(1, call)[0].requires_grad
    assert saved == []
    assert not apply(LOGITS).requires_grad


def test_logits_that_are_no_leaf():
    weight = torch.randn(4, 8, requires_grad=True)
    hidden = torch.randn(2, 3, 4)
    apply(hidden @ weight).sum().backward()
    expected = weight.detach().clone().requires_grad_()
    torch.log_softmax(hidden @ expected, -1)[..., 0].sum().backward()
    torch.testing.assert_close(weight.grad, expected.grad)


def test_twice_backward_through_a_retained_graph():
    logits = torch.randn(2, 3, 8, requires_grad=True)
    value = apply(logits)
    first = torch.autograd.grad(value.sum(), logits, retain_graph=True)[0]
    second = torch.autograd.grad(value.sum(), logits)[0]
    assert torch.equal(first, second)


@pytest.mark.parametrize("loss", [lambda value: value.sum(), lambda value: (value**2).sum()])
def test_second_derivative_is_an_error_never_a_silent_zero(loss):
    logits = torch.randn(2, 3, 8, requires_grad=True)
    value = apply(logits)
    first = torch.autograd.grad(loss(value), logits, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="differentiated once"):
        (first**2).sum().backward()


def test_logits_changed_between_forward_and_backward_are_noticed():
    logits = torch.randn(2, 3, 8, requires_grad=True) * 1
    value = apply(logits)
    with torch.no_grad():
        logits.zero_()
    with pytest.raises(RuntimeError, match="inplace operation"):
        value.sum().backward()


def test_target_may_change_between_forward_and_backward():
    logits, target = torch.zeros(1, 4, requires_grad=True), torch.tensor([1])
    value = on_ranks(1, lambda g: DistributedLogprob.apply(logits, target, 0, 4, g))[0]
    target[0] = 3
    value.sum().backward()
    assert logits.grad.tolist() == [[-0.25, 0.75, -0.25, -0.25]]
