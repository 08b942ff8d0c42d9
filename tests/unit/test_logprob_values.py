"""Log-probabilities and their gradients against float64, and in closed form."""

from __future__ import annotations

import math

import pytest
import torch
from logprob_ranks import DTYPES, logprob, on_ranks, reference, sharded, within_tolerance

from cupy_coll import (
    ChunkedDistributedLogprob,
    DistributedLogprob,
    _compute_distributed_log_softmax,
    from_parallel_logits_to_logprobs,
)

pytestmark = pytest.mark.usefixtures("computed_by")

INF = float("inf")
NAN = float("nan")


def draw(rows: int, vocab: int, scale: float, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return (torch.randn(rows, vocab) * scale).to(dtype), torch.randint(0, vocab, (rows,))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 20.0, 300.0, 1e4])
def test_values_and_gradients_against_float64(dtype, scale):
    # One rounding to the logits' dtype: half a unit in the last place of a gradient below 4 in size.
    rounding = {torch.float16: 2**-10, torch.bfloat16: 2**-7}.get(dtype, 0.0)
    for size, vocab in ((1, 1000), (2, 1000), (3, 999), (4, 1024), (7, 700), (16, 1024)):
        logits, target = draw(6, vocab, scale, dtype)
        target[1] = -100
        upstream = torch.tensor([1.0, 1.0, -2.0, 0.5, 0.0, 3.0])
        expected = reference(logits, target)
        found = logprob(logits, target, size)
        assert found.value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert within_tolerance(found.value, expected.logprob), (size, vocab)
        gradient, wanted = found.gradient(upstream).double(), expected.gradient(upstream)
        assert (gradient - wanted).abs().max() <= 1e-5 + rounding, (size, vocab)
        assert not gradient[1].any()
        assert not gradient[4].any()


@pytest.mark.on_kernels_too
@pytest.mark.parametrize("offset", [1e3, -1e4])
def test_logits_far_from_zero(offset):
    """The maximum and log S stay apart: their sum would be rounded to 5e-4 here."""
    torch.manual_seed(1)
    logits, target = torch.randn(50, 1000) + offset, torch.randint(0, 1000, (50,))
    expected = reference(logits, target)
    found = logprob(logits, target, 2)
    assert within_tolerance(found.value, expected.logprob)
    assert (found.gradient(torch.ones(50)).double() - expected.gradient(torch.ones(50))).abs().max() < 1e-6


@pytest.mark.on_kernels_too
def test_gradient_of_low_precision_logits_is_rounded_once():
    for dtype in (torch.bfloat16, torch.float16):
        logits, target = draw(8, 512, 3.0, dtype)
        upstream = torch.linspace(-2, 2, 8)
        gradient = logprob(logits, target, 2).gradient(upstream)
        exact = reference(logits, target).gradient(upstream)
        spacing = torch.finfo(dtype).eps * exact.abs() + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        assert ((gradient.double() - exact).abs() <= spacing * 0.501 + 1e-9).all()


@pytest.mark.on_torch
def test_gradient_check_in_float64():
    torch.manual_seed(1)
    logits = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([3, -100, 9])

    def call(x):
        return on_ranks(1, lambda group: DistributedLogprob.apply(x, target, 0, 10, group, temperature=0.5))[0]

    assert torch.autograd.gradcheck(call, (logits,))


@pytest.mark.on_kernels_too
@pytest.mark.parametrize("temperature", [0.25, 1.7, 100.0])
def test_temperature(temperature):
    logits, target = draw(5, 256, 20.0, torch.float32)
    upstream = torch.ones(5)
    expected = reference(logits, target, temperature)
    for size in (1, 4):
        found = logprob(logits, target, size, temperature=temperature)
        assert within_tolerance(found.value, expected.logprob)
        torch.testing.assert_close(found.gradient(upstream).double(), expected.gradient(upstream), atol=1e-6, rtol=1e-5)


@pytest.mark.on_kernels_too
def test_nearly_all_logits_minus_infinity():
    logits = torch.full((1, 8), -INF)
    logits[0, 5] = 10.0
    assert logprob(logits, torch.tensor([5]), 2).value.tolist() == [0.0]

    logits = torch.tensor([[1.0, 2.0, -INF, -INF]]).expand(3, 4)
    found = logprob(logits, torch.tensor([0, 1, 2]), 2)
    values = found.value.tolist()
    assert values[:2] == pytest.approx([-1.313262, -0.313262], abs=1e-6)
    assert values[2] == -INF
    gradient = found.gradient(torch.tensor([0.0, 1.0, 0.0]))
    assert gradient[1].tolist() == pytest.approx([-0.268941, 0.268941, 0, 0], abs=1e-6)


@pytest.mark.on_kernels_too
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("entropy_scale", [1.0, 0.5])
def test_infinities_as_unsharded(size, entropy_scale):
    torch.manual_seed(2)
    logits = torch.randn(7, 16)
    logits[0, :4] = -INF  # a shard of four
    logits[1, 4:] = -INF  # all others
    logits[2, :] = -INF  # the row
    logits[3, ::2] = -INF
    logits[4, 3] = INF
    logits[5, 9] = NAN
    for column in (0, 5, 15):
        target = torch.full((7,), column)
        expected = reference(logits, target, entropy_scale)
        found = logprob(logits, target, size, temperature=entropy_scale)
        assert within_tolerance(found.value, expected.logprob)
        torch.testing.assert_close(
            found.gradient(torch.ones(7)).double(),
            expected.gradient(torch.ones(7)),
            equal_nan=True,
            atol=1e-6,
            rtol=1e-5,
        )


@pytest.mark.on_kernels_too
def test_nan_in_one_shard_is_nan_everywhere():
    for bad in range(8):
        logits = torch.zeros(2, 8)
        logits[0, bad] = NAN
        found = logprob(logits, torch.tensor([3, 3]), 4)
        value = found.value.tolist()
        assert math.isnan(value[0])
        assert value[1] == pytest.approx(-math.log(8))
        gradient = found.gradient(torch.ones(2))
        assert gradient[0].isnan().all()
        assert gradient[1].isfinite().all()


@pytest.mark.on_kernels_too
def test_ignored_target_and_gradient_of_a_rank_that_does_not_own_it():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).expand(2, 4)
    found = logprob(logits, torch.tensor([3, -100]), 2)
    assert found.value[0].item() == pytest.approx(-0.440190, abs=1e-6)
    assert found.value[1].item() == 0.0
    gradient = found.gradient(torch.ones(2))
    assert gradient[0].tolist() == pytest.approx([-0.032059, -0.087144, -0.236883, 0.356086], abs=1e-6)
    assert gradient[1].tolist() == [0.0] * 4


@pytest.mark.on_kernels_too
def test_rows_without_incoming_gradient_are_zero_whatever_they_hold():
    logits = torch.full((4, 8), NAN)
    logits[2] = 0.0
    target = torch.tensor([1, -100, 1, 1])
    gradient = logprob(logits, target, 2).gradient(torch.tensor([0.0, 1.0, 1.0, 0.0]))
    assert gradient[[0, 1, 3]].tolist() == [[0.0] * 8] * 3
    assert gradient[2].tolist() == pytest.approx([-0.125, 0.875] + [-0.125] * 6)


@pytest.mark.parametrize("chunk_size", [None, 1, 2, 3, 5, 7])
def test_chunk_size(chunk_size):
    torch.manual_seed(3)
    logits, tokens = torch.randn(2, 5, 8), torch.randint(0, 8, (2, 5))
    expected = reference(logits[:, :-1], tokens[:, 1:])
    found = sharded(
        logits,
        2,
        lambda shard, start, end, group: from_parallel_logits_to_logprobs(
            shard, tokens, start, end, group, chunk_size=chunk_size
        ),
    )
    assert within_tolerance(found.value, expected.logprob)
    upstream = torch.linspace(1, 2, 8).view(2, 4)
    gradient = found.gradient(upstream)
    assert (gradient[:, :-1].double() - expected.gradient(upstream)).abs().max() < 1e-6
    assert not gradient[:, -1].any()


@pytest.mark.on_kernels_too
def test_bf16_closed_form():
    logits = torch.zeros(2, 1024, dtype=torch.bfloat16)
    logits[:, 0] = 8
    for size in (1, 2, 4):
        values = logprob(logits, torch.tensor([0, 1]), size).value.tolist()
        assert values == pytest.approx([-0.295039, -8.295039], abs=1e-5)


@pytest.mark.on_kernels_too
@pytest.mark.parametrize("widths", [(5, 3, 2), (1, 9, 0), (0, 0, 10), (10, 0, 0), (4, 4, 2)])
def test_uneven_and_empty_shards(widths):
    logits, target = draw(10, 10, 3.0, torch.float32)
    target = torch.arange(10)
    expected = reference(logits, target)
    found = logprob(logits, target, 3, widths)
    assert within_tolerance(found.value, expected.logprob)
    upstream = torch.linspace(-1, 1, 10)
    torch.testing.assert_close(found.gradient(upstream).double(), expected.gradient(upstream), atol=1e-6, rtol=1e-5)


def test_a_rank_that_owns_nothing_may_say_so_anywhere():
    shards = [torch.zeros(2, 3), torch.full((2, 3), NAN), torch.zeros(2, 3)]
    for nothing in ((0, 0), (3, 3), (6, 6), (99, 99)):
        bounds = [(0, 3), nothing, (3, 6)]
        values = on_ranks(
            3,
            lambda g, b=bounds: DistributedLogprob.apply(shards[g.rank], torch.tensor([2, 3]), *b[g.rank], g),
        )
        for value in values:
            assert value.tolist() == pytest.approx([-math.log(6)] * 2)


@pytest.mark.on_kernels_too
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_columns_count_for_nothing_and_get_no_gradient(dtype):
    logits, target = draw(6, 10, 3.0, dtype)
    padded = torch.full((6, 12), NAN, dtype=dtype)
    padded[:, :10] = logits
    shards = [padded[:, 4 * rank : 4 * rank + 4].clone().requires_grad_() for rank in range(3)]
    bounds = [(0, 4), (4, 8), (8, 10)]
    values = on_ranks(3, lambda g: DistributedLogprob.apply(shards[g.rank], target, *bounds[g.rank], g))
    assert within_tolerance(values[0], reference(logits, target).logprob)
    for value in values:
        value.sum().backward()
    assert shards[2].grad[:, 2:].tolist() == [[0.0, 0.0]] * 6
    assert all(shard.grad.isfinite().all() for shard in shards)


@pytest.mark.on_kernels_too
@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0), (3, 1, 2), (2, 2, 2, 2)])
def test_any_leading_shape(shape):
    torch.manual_seed(4)
    logits = torch.randn(*shape, 32)
    target = torch.randint(0, 32, shape)
    found = logprob(logits, target, 2)
    assert found.value.shape == shape
    assert within_tolerance(found.value, reference(logits, target).logprob)
    gradient = found.gradient(torch.ones(shape))
    assert gradient.shape == logits.shape
    assert [group.calls for group in found.groups] == [1, 1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_target_dtypes(dtype):
    logits, target = draw(5, 32, 1.0, torch.float32)
    assert within_tolerance(logprob(logits, target.to(dtype), 2).value, reference(logits, target).logprob)


@pytest.mark.on_kernels_too
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_softmax(dtype):
    logits, _ = draw(9, 60, 20.0, dtype)
    logits[3, 7] = -INF
    logits = logits.view(3, 3, 60)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for size, widths in ((1, None), (2, None), (3, (10, 50, 0)), (4, None)):
        found = sharded(logits, size, lambda s, start, end, g: _compute_distributed_log_softmax(s, g), widths)
        whole = torch.cat(found.values, -1)
        expected = torch.log_softmax(logits.double(), -1)
        assert whole.dtype == dtype
        assert not any(value.requires_grad for value in found.values)
        if dtype == wide:
            assert within_tolerance(whole, expected)
        else:
            torch.testing.assert_close(whole, expected.to(dtype))
        assert [group.calls for group in found.groups] == [1] * size


@pytest.mark.on_kernels_too
def test_one_message_forward_none_backward():
    logits, target = draw(12, 64, 1.0, torch.float32)
    for size, slots in ((1, 16), (2, 8), (3, 1), (4, 4), (8, 2), (16, 1)):
        widths = None if 64 % size == 0 else (22, 21, 21)
        for chunk_size in (None, 1, 5):
            found = sharded(
                logits,
                size,
                lambda s, a, b, g, chunk_size=chunk_size: (
                    DistributedLogprob.apply(s, target, a, b, g)
                    if chunk_size is None
                    else ChunkedDistributedLogprob.apply(s, target, a, b, chunk_size, g)
                ),
                widths,
            )
            found.gradient(torch.ones(12))
            assert [group.calls for group in found.groups] == [1] * size
            header = 8  # four int64 in float32
            assert [group.sent for group in found.groups] == [header + 12 * (2 * slots + 1)] * size


@pytest.mark.on_kernels_too
def test_incoming_gradient_expanded_or_transposed_and_never_modified():
    torch.manual_seed(5)
    logits, target = torch.randn(4, 3, 32), torch.randint(0, 32, (4, 3))
    expected = reference(logits, target, 0.5)
    for upstream in (
        torch.tensor(2.0).expand(4, 3),
        torch.randn(3, 4).t(),
        torch.randn(1, 3).expand(4, 3),
        torch.randn(4, 6)[:, ::2],
    ):
        before = upstream.clone()
        gradient = logprob(logits, target, 2, temperature=0.5).gradient(upstream)
        torch.testing.assert_close(
            gradient.double(), expected.gradient(before), atol=1e-6, rtol=1e-5, msg=f"{upstream.stride()}"
        )
        assert torch.equal(upstream, before)


@pytest.mark.on_kernels_too
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_any_layout(dtype):
    torch.manual_seed(6)
    base = torch.randn(6, 4, 5, 40).to(dtype)
    layouts = {
        "transposed rows": base[0].transpose(0, 1),
        "columns outermost": base[0].permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "slice of rows": base[0][:, :-1],
        "slice of columns": base[0][..., 3:37],
        "every second column": base[0][..., ::2],
        "expanded": base[0, :1].expand(7, 5, 40),
        "four dimensions, permuted": base.permute(2, 0, 1, 3),
        "reversed order": base.permute(2, 1, 0, 3)[:, 1:],
    }
    for name, view in layouts.items():
        target = torch.randint(0, view.shape[-1], view.shape[:-1])
        target[0, 0] = -100
        upstream = torch.randn(view.shape[:-1])
        upstream[1, 1] = 0
        straight = view.contiguous().requires_grad_()
        turned = view.detach().requires_grad_()
        width = view.shape[-1]
        before = turned.detach().clone()
        values = [
            on_ranks(1, lambda g, x=x, t=target, w=width: DistributedLogprob.apply(x, t, 0, w, g))[0]
            for x in (straight, turned)
        ]
        assert torch.equal(values[0], values[1]), name
        gradients = [torch.autograd.grad(v, x, upstream)[0] for v, x in zip(values, (straight, turned), strict=True)]
        assert torch.equal(gradients[0], gradients[1]), name
        assert torch.equal(turned.detach(), before), name
