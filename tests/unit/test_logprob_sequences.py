"""The shift by one token, and padding."""

from __future__ import annotations

import pytest
import torch
from logprob_ranks import reference, sharded, within_tolerance

from cupy_coll import from_parallel_logits_to_logprobs
from cupy_coll.layout import next_token_index
from cupy_coll.logprob.sequences import shift_to_next


def test_next_token_index():
    assert next_token_index(4, 4).tolist() == [1, 2, 3, -1]
    assert next_token_index(3, 6).tolist() == [1, 2, -1, -1, -1, -1]
    assert next_token_index(1, 2).tolist() == [-1, -1]
    assert next_token_index(0, 0).tolist() == []


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_shift_to_next(dtype):
    tokens = torch.tensor([[5, 6, 7], [1, -100, 2]], dtype=dtype)
    shifted = shift_to_next(tokens, 4)
    assert shifted.tolist() == [[6, 7, -100, -100], [-100, 2, -100, -100]]
    assert shifted.dtype == dtype
    assert tokens.tolist() == [[5, 6, 7], [1, -100, 2]]


def call(tokens, **options):
    return lambda shard, start, end, group: from_parallel_logits_to_logprobs(
        shard, tokens, start, end, group, **options
    )


@pytest.mark.parametrize("length", [0, 1, 2, 5, 7])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_target_shorter_than_the_logits(length, chunk_size):
    torch.manual_seed(length)
    logits, tokens = torch.randn(3, 7, 32), torch.randint(0, 32, (3, length))
    found = sharded(logits, 2, call(tokens, chunk_size=chunk_size, temperature=0.5))
    count = max(length - 1, 0)
    assert found.value.shape == (3, count)
    expected = reference(logits[:, :count], tokens[:, 1:], 0.5)
    assert within_tolerance(found.value, expected.logprob)
    upstream = torch.randn(3, count)
    gradient = found.gradient(upstream)
    torch.testing.assert_close(gradient[:, :count].double(), expected.gradient(upstream), atol=1e-6, rtol=1e-5)
    assert not gradient[:, count:].any()
    assert [group.calls for group in found.groups] == [1, 1]


def test_first_token_is_nobodys_target():
    tokens = torch.tensor([[999, 1, 2]])
    value = sharded(torch.zeros(1, 3, 8), 2, call(tokens)).value
    torch.testing.assert_close(value, torch.full((1, 2), 8.0).log().neg())


def test_inference_only():
    value = sharded(torch.zeros(1, 3, 8), 2, call(torch.zeros(1, 3, dtype=torch.int64), inference_only=True)).value
    assert not value.requires_grad
