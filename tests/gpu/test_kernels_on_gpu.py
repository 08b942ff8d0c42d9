"""The CUDA kernels on a real GPU, against float64: values, gradients, bits, layouts, streams, graphs.

With GPU_CHECK_DRY_RUN=1 the same tests run on the processor, to see that they would run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from kernels_on_host.device import HostDevice
from logprob_ranks import groups_of, logprob, reference, same_bits, within_tolerance

from cupy_coll import (
    ChunkedDistributedGatherLogprob,
    DistributedLogprob,
    _compute_distributed_log_softmax,
    vocab_parallel_logprob_and_entropy,
)

DRY_RUN = bool(os.environ.get("GPU_CHECK_DRY_RUN"))
INF, NAN = float("inf"), float("nan")
TYPES = [torch.bfloat16, torch.float16, torch.float32]
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 0.0}
LARGE = [] if DRY_RUN else [128_256, 262_144]


@pytest.fixture
def place() -> Iterator[str]:
    if not DRY_RUN:
        yield "cuda"
        return
    with HostDevice(checks=False).installed():
        yield "cpu"


def both(logits, target, **options):
    group = groups_of(1, 1)[0][0]
    ends = {"vocab_start_index": 0, "vocab_end_index": logits.shape[-1]}
    return vocab_parallel_logprob_and_entropy(logits, target, group, **ends, **options)


def check(logits: torch.Tensor, target: torch.Tensor) -> None:
    expected = reference(logits.cpu(), target.cpu())
    leaf = logits.detach().requires_grad_()
    value, entropy = both(leaf, target)
    assert within_tolerance(value.cpu(), expected.logprob)
    assert within_tolerance(entropy.cpu(), expected.entropy)
    g, h = torch.randn(target.shape), torch.randn(target.shape)
    (found,) = torch.autograd.grad((value, entropy), leaf, (g.to(leaf.device), h.to(leaf.device)))
    wanted = expected.gradient(g, h)
    error = (found.cpu().double() - wanted).abs()
    allowed = 2e-6 + 2**-25 + (1e-5 + ROUNDING[logits.dtype]) * wanted.abs()
    assert torch.where(wanted.isnan(), found.cpu().isnan(), error <= allowed).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 7, 1024, 4097, 16 * 501, 50_257, *LARGE])
def test_values_and_gradients(place, dtype, vocab):
    torch.manual_seed(vocab)
    target = torch.randint(0, vocab, (5,))
    target[1] = -100
    check((torch.randn(5, vocab) * 5).to(place, dtype), target.to(place))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_infinities_and_nan(place, dtype):
    logits = torch.randn(6, 1040).to(dtype)
    logits[0] = -INF
    logits[1, :520] = -INF
    logits[2, ::2] = -INF
    logits[3] = -INF
    logits[3, 1] = NAN
    logits[4, 8] = INF
    check(logits.to(place), torch.tensor([0, 0, 1, 2, 8, 3], device=place))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_any_layout_gives_the_same_bits(place, dtype):
    x = (torch.randn(4, 6, 3, 530) * 4).to(place, dtype)
    views = [x[:, :-1, 0], x[:, 1:, :2], x[:, :, 0].transpose(0, 1), x[0, 0, :, 1:], x[0, 0, :, ::2], x[:, 0, 0].t()]
    for logits in views:
        target = torch.randint(0, logits.shape[-1], logits.shape[:-1], device=place)
        found = []
        for one in (logits, logits.contiguous()):
            leaf = one.detach().requires_grad_()
            value, entropy = both(leaf, target)
            found.append((value, entropy, *torch.autograd.grad((value + entropy).sum(), leaf)))
        assert all(same_bits(a, b) for a, b in zip(*found, strict=True)), logits.stride()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_any_rows_and_tensor_parallel_size_give_the_same_bits(place, dtype):
    logits, upstream = torch.randn(64, 16 * 1001).to(place, dtype), torch.randn(64, device=place)
    target = torch.randint(0, 16 * 1001, (64,), device=place)
    whole = logprob(logits, target, 1)
    gradient = whole.gradient(upstream)
    for size in (1, 2, 4, 8, 16):
        for rows in (1, 3, 64):
            found = logprob(logits[:rows], target[:rows], size)
            assert same_bits(found.value, whole.value[:rows]), (size, rows)
            assert same_bits(found.gradient(upstream[:rows]), gradient[:rows]), (size, rows)


def test_rows_without_gradient_in_place_and_several_targets(place):
    logits, target = torch.randn(4, 5000, device=place).bfloat16(), torch.tensor([0, 1, 4999, 7], device=place)
    expected = logits.clone().requires_grad_()
    sum(both(expected, target)).sum().backward()
    hidden = logits.clone().requires_grad_()
    sum(both(hidden * 1, target, inplace_backward=True)).sum().backward()
    assert same_bits(hidden.grad, expected.grad)
    leaf = torch.full((2, 3000), NAN, device=place).requires_grad_()
    both(leaf, target[:2])[0].backward(torch.zeros(2, device=place))
    assert not leaf.grad.any()
    indices = torch.randint(0, 5000, (4, 9), device=place)
    group = groups_of(1, 1)[0][0]
    leaf = logits.float().requires_grad_()
    ChunkedDistributedGatherLogprob.apply(leaf, indices, 0, 5000, 2, group).sum().backward()
    wide = logits.double().requires_grad_()
    torch.log_softmax(wide, -1).gather(-1, indices).sum().backward()
    assert (leaf.grad.double() - wide.grad).abs().max() < 1e-5
    found = _compute_distributed_log_softmax(logits.float(), group)
    assert (found.double() - torch.log_softmax(logits.double(), -1)).abs().max() < 5e-6


@pytest.mark.skipif(DRY_RUN, reason="needs more than 2^31 logits in the memory of a GPU")
def test_offsets_past_32_bits(place):
    rows, vocab = 17_000, 128_256
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device=place)
    logits[-1] = torch.randn(vocab)
    target = torch.zeros(rows, dtype=torch.int64, device=place)
    expected = reference(logits[-1:].cpu(), target[-1:].cpu())
    leaf = logits.requires_grad_()
    value, _ = both(leaf, target)
    assert within_tolerance(value[-1:].cpu(), expected.logprob)
    value.sum().backward()
    error = (leaf.grad[-1:].cpu().double() - expected.gradient(torch.ones(1))).abs()
    assert error.max() < 2**-8


@pytest.mark.skipif(DRY_RUN, reason="streams and graphs are a GPU's")
def test_on_a_side_stream_and_in_a_graph(place):
    logits, target = torch.randn(64, 32_000, device=place).bfloat16(), torch.randint(0, 32_000, (64,), device=place)
    group = groups_of(1, 1)[0][0]
    group.barrier.wait = lambda *_: None
    leaf = logits.clone().requires_grad_()

    def step():
        leaf.grad = None
        value = DistributedLogprob.apply(leaf, target, 0, 32_000, group)
        value.sum().backward()
        return value

    expected = step().detach().clone()
    gradient = leaf.grad.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            value = step()
    side.synchronize()
    assert same_bits(value, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        leaf.copy_(logits * 0)
    graph.replay()
    torch.cuda.synchronize()
    assert not same_bits(captured, expected)
    with torch.no_grad():
        leaf.copy_(logits)
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(captured, expected)
    assert same_bits(leaf.grad, gradient)
