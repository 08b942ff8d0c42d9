"""Entropy, alone and together with log-probabilities, against float64."""

from __future__ import annotations

import pytest
import torch
from logprob_ranks import DTYPES, on_ranks, ranges, reference, same_bits, sharded, within_tolerance

from cupy_coll import (
    ChunkedDistributedEntropy,
    DistributedLogprob,
    ShapeError,
    vocab_parallel_logprob_and_entropy,
)

pytestmark = pytest.mark.usefixtures("computed_by")

INF = float("inf")


def both(target, **options):
    def call(shard, start, end, group):
        found = vocab_parallel_logprob_and_entropy(
            shard, target, group, vocab_start_index=start, vocab_end_index=end, **options
        )
        return torch.stack(found)

    return call


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 20.0, 300.0])
def test_values_and_gradients_against_float64(dtype, scale):
    rounding = {torch.float16: 2**-8, torch.bfloat16: 2**-5}.get(dtype, 0.0)  # gradients below 16 in size
    for size, vocab, temperature in ((1, 1000, 1.0), (2, 1000, 0.7), (3, 999, 2.0), (16, 1024, 1.0)):
        torch.manual_seed(vocab)
        logits = (torch.randn(6, vocab) * scale).to(dtype)
        target = torch.randint(0, vocab, (6,))
        target[1] = -100  # has an entropy all the same
        g, h = torch.tensor([1.0, 1, 0, -2, 0, 0]), torch.tensor([0.0, 2, 1, 0.5, 0, -1])
        expected = reference(logits, target, temperature)
        found = sharded(logits, size, both(target, temperature=temperature))
        assert within_tolerance(found.value[0], expected.logprob)
        torch.testing.assert_close(found.value[1].double(), expected.entropy, atol=3e-6, rtol=1e-5)
        gradient = found.gradient(torch.stack([g, h])).double()
        assert (gradient - expected.gradient(g, h)).abs().max() <= 2e-5 + rounding
        assert scale > 1 or gradient[1].any()
        assert not gradient[4].any()
        assert [group.calls for group in found.groups] == [1] * size


@pytest.mark.on_kernels_too
@pytest.mark.parametrize("size", [1, 2, 4])
def test_minus_infinity_times_zero_is_zero(size):
    torch.manual_seed(1)
    logits = torch.randn(5, 16)
    logits[0, :4] = -INF
    logits[1, 1:] = -INF  # certain
    logits[2, ::2] = -INF
    logits[3, :] = -INF
    target = torch.tensor([8, 0, 1, 0, 0])
    expected = reference(logits, target)
    found = sharded(logits, size, both(target))
    value = found.value.detach()
    assert value[1, 1].item() == 0.0
    assert torch.isnan(value[:, 3]).all()
    finite = [0, 1, 2, 4]
    torch.testing.assert_close(value[1, finite].double(), expected.entropy[finite], atol=1e-6, rtol=1e-5)
    gradient = found.gradient(torch.ones(2, 5)).double()
    assert torch.isnan(gradient[3]).all()
    # float64 autograd has 0 * -inf in its gradient: in closed form p (1[y] / p - 1 - log p - H)
    p = torch.softmax(logits.double(), -1)
    logs = torch.where(p == 0, 0.0, p.log())
    one = torch.nn.functional.one_hot(target, 16)
    wanted = one - p - p * (logs + expected.entropy.detach().unsqueeze(-1))
    torch.testing.assert_close(gradient[finite], wanted[finite], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_negative_entropy(chunk_size):
    torch.manual_seed(2)
    logits, upstream = torch.randn(2, 3, 48) * 4, torch.randn(2, 3)
    expected = reference(logits, torch.zeros(2, 3, dtype=torch.int64))
    for size, widths in ((1, None), (2, None), (3, (20, 28, 0))):
        found = sharded(
            logits, size, lambda shard, a, b, g: ChunkedDistributedEntropy.apply(shard, chunk_size, g), widths
        )
        torch.testing.assert_close(found.value.double(), -expected.entropy, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(
            found.gradient(upstream).double(), expected.gradient(entropy=-upstream), atol=1e-6, rtol=1e-5
        )
        assert [group.calls for group in found.groups] == [1] * size


@pytest.mark.on_torch
def test_gradient_check_in_float64():
    torch.manual_seed(3)
    logits = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([3, -100, 9])

    def call(x):
        return on_ranks(1, lambda group: both(target, temperature=0.5)(x, 0, 10, group))[0]

    assert torch.autograd.gradcheck(call, (logits,))


@pytest.mark.on_kernels_too
def test_one_of_the_two_is_enough():
    torch.manual_seed(4)
    logits, target, upstream = torch.randn(4, 32), torch.randint(0, 32, (4,)), torch.randn(4)
    expected = reference(logits, target)
    for which, wanted in ((0, expected.gradient(upstream)), (1, expected.gradient(entropy=upstream))):
        found = sharded(logits, 2, lambda s, a, b, g, which=which: both(target)(s, a, b, g)[which])
        torch.testing.assert_close(found.gradient(upstream).double(), wanted, atol=1e-6, rtol=1e-5)


def test_log_probability_is_that_of_the_function_without_entropy():
    torch.manual_seed(5)
    logits, target = torch.randn(7, 16 * 33) * 3, torch.randint(0, 16 * 33, (7,))
    with_entropy = sharded(logits, 2, both(target)).value[0]
    alone = sharded(logits, 2, lambda s, a, b, g: DistributedLogprob.apply(s, target, a, b, g)).value
    assert same_bits(with_entropy, alone)


@pytest.mark.on_kernels_too
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_in_place(dtype):
    torch.manual_seed(6)
    data, target = torch.randn(6, 5, 64).to(dtype), torch.randint(0, 64, (5, 6))
    target[2, 2] = -100
    upstream = torch.randn(2, 5, 6)
    upstream[:, 0, 1] = 0
    gradients = []
    for inplace in (False, True):
        leaves = [data[..., a:b].clone().requires_grad_() for a, b in ranges(64, 2)]
        logits = [(leaf * 1).transpose(0, 1) for leaf in leaves]  # neither a leaf nor contiguous
        values = on_ranks(2, lambda g, x=logits, i=inplace: both(target, inplace_backward=i)(
            x[g.rank], *ranges(64, 2)[g.rank], g
        ))  # fmt: skip
        seen = []
        for value, x in zip(values, logits, strict=True):
            x.register_hook(lambda gradient, x=x, seen=seen: seen.append(gradient.data_ptr() == x.data_ptr()))
            value.backward(upstream)
        assert seen == [inplace] * 2
        gradients.append(torch.cat([leaf.grad for leaf in leaves], -1))
    assert same_bits(*gradients)


@pytest.mark.on_torch
def test_backward_in_place_needs_memory_of_its_own():
    logits, target = torch.zeros(1, 8).expand(3, 8), torch.zeros(3, dtype=torch.int64)
    found = on_ranks(1, lambda g: both(target, inplace_backward=True)(logits, 0, 8, g), errors=True)
    assert isinstance(found[0], ShapeError)
    assert "inplace_backward" in str(found[0])


@pytest.mark.on_kernels_too
def test_backward_in_place_is_noticed_by_others_who_saved_the_logits():
    logits = torch.randn(3, 8, requires_grad=True) * 1
    squares = (logits * logits).sum()
    value = on_ranks(1, lambda g: both(torch.zeros(3, dtype=torch.int64), inplace_backward=True)(logits, 0, 8, g))[0]
    value.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        squares.backward()
