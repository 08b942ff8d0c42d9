"""Log-probabilities as on GPUs: the CUDA kernels, on the processor, and the messages over NCCL's stand-in.

Most tests are those of ``tests/ranks``. What raises there on all ranks, because the host sees the ranks' ranges and the
targets, is NaN here, where the host does not wait for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from conftest import standin
from test_logprob_on_ranks import (  # noqa: F401
    draw,
    part,
    reference,
    test_closed_forms_on_two_ranks,
    test_context_parallel_order_in_closed_form,
    test_context_parallel_values_gradients_messages_and_bits,
    test_entropy_and_log_softmax,
    test_mesh_and_ranks_outside,
    test_packed_label_shift_in_closed_form,
    test_padding_columns,
    test_same_bits_for_any_rows_chunk_and_tensor_parallel_size,
    test_sequences_and_chunks,
    test_values_gradients_and_messages,
    test_without_rows,
)

from cupy_coll import DistributedLogprob, from_parallel_logits_to_logprobs, vocab_parallel_logprob_and_entropy

CHECKED_RANKS = 2  # more ranks do the same, and would take long on few cores


@pytest.fixture(autouse=True)
def kernels(fake, size) -> Iterator[None]:
    fake.checks = size <= CHECKED_RANKS
    yield
    fake.checks = True


def test_launches_and_messages_follow_each_other_on_the_programs_stream(world, fake, expect):
    logits, target = draw(3, 16 * world.size)
    shard, start, end = part(logits, world)
    world.warm_up()
    standin.clear()
    fake.take_log()
    value, entropy = vocab_parallel_logprob_and_entropy(
        shard, target, world, vocab_start_index=start, vocab_end_index=end
    )
    expected = [("launch", "softmax_partials"), ("nccl", "AllGather"), ("launch", "merge_partials")]
    log = [entry for entry in fake.take_log() if entry[0] in ("launch", "nccl")]
    expect([(what, name) for what, _, name in log], expected)
    expect({stream for _, stream, _ in log}, {fake.stream}, "streams")
    (value + entropy).sum().backward()
    log = [entry for entry in fake.take_log() if entry[0] in ("launch", "nccl")]
    expect([(what, name) for what, _, name in log], [("launch", "logprob_backward")], "of the backward")


def test_the_values_of_the_host(world, fake, expect):
    """Not the same bits: the host sums in another order."""
    logits, target = draw(5, 501 * world.size, scale=20.0)
    shard, start, end = part(logits, world)
    value = DistributedLogprob.apply(shard, target, start, end, world)
    fake.enabled = False
    on_host = DistributedLogprob.apply(shard, target, start, end, world)
    fake.enabled = True
    expect(value.detach(), on_host.detach(), "log-probabilities", rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [-1, -101, 10**6])
def test_target_that_nobody_owns_is_nan_on_all_ranks(world, expect, bad):
    logits, target = draw(4, 16 * world.size)
    target[2] = bad
    shard, start, end = part(logits, world)
    value = DistributedLogprob.apply(shard, target, start, end, world)
    expect(value.isnan().tolist(), [False, False, True, False])


def test_ranges_that_do_not_fit_are_nan_on_all_ranks_and_the_next_call_works(world, rank, size, expect):
    logits, target = draw(4, 16 * size)
    shard, start, end = part(logits, world)
    wrong = 1 if rank == size - 1 else 0
    value = DistributedLogprob.apply(shard, target, start + wrong, end + wrong, world)
    expect(value.isnan().all().item(), True, "a gap")
    value = DistributedLogprob.apply(shard, target, start, end, world)
    expected, _ = reference(logits, target, torch.ones(4))
    expect(value.detach().double(), expected, "after it", rtol=1e-5, atol=1e-6)


def test_a_part_of_the_sequence_without_values_is_nan_on_all_context_parallel_ranks(group_of, rank, size, expect):
    if size < 2:
        return
    context = group_of(range(2))
    alone = [group_of([other]) for other in range(size)][rank]
    if context is None:
        return
    logits, tokens = torch.randn(1, 4, 32), torch.arange(8).view(1, 8)
    tokens[0, 1] = 99  # the target of position 0, which the first rank holds
    value = from_parallel_logits_to_logprobs(logits, tokens, 0, 32, alone, cp_group=context)
    expect(value.isnan()[0].tolist(), [True] + [False] * 6)
