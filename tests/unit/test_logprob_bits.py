"""The same bits for any number of rows, chunk, tensor-parallel size, layout and number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from logprob_ranks import logprob, same_bits, sharded

from cupy_coll import ChunkedDistributedLogprob, tp_invariant, vocab_parallel_logprob_and_entropy
from cupy_coll.logprob.partials import SUBTILE_COLUMNS
from cupy_coll.logprob.rows import BLOCK_ELEMENTS

pytestmark = pytest.mark.usefixtures("computed_by")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def draw(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(vocab)
    return (torch.randn(rows, vocab) * 5).to(dtype), torch.randint(0, vocab, (rows,)), torch.randn(rows)


@pytest.mark.parametrize(
    ("width", "dtype"),
    [(width, torch.float32) for width in (1, 33, 501, 520, 2004)]
    + [(1, torch.bfloat16), (501, torch.bfloat16), (33, torch.float64)],
)
def test_any_rows_and_tensor_parallel_size(width, dtype):
    logits, target, upstream = draw(64, 16 * width, dtype)
    whole = logprob(logits, target, 1)
    value, gradient = whole.value, whole.gradient(upstream)
    cases = [(1, size, rows) for size in (1, 2, 4, 8, 16) for rows in (1, 3, 64)]
    for threads, size, rows in [*cases, (2, 1, 1), (2, 1, 64), (2, 2, 64), (2, 16, 3)]:
        torch.set_num_threads(threads)
        assert tp_invariant(16 * width, size)
        found = logprob(logits[-rows:], target[-rows:], size)
        assert same_bits(found.value, value[-rows:]), (threads, size, rows)
        assert same_bits(found.gradient(upstream[-rows:]), gradient[-rows:]), (threads, size, rows)


@pytest.mark.parametrize("width", [8016, SUBTILE_COLUMNS, 2 * SUBTILE_COLUMNS + 5])
def test_wide_tiles(width):
    """Rows that fill a block, sub-tiles, and sums that torch would split over threads."""
    logits, target, upstream = draw(3, 16 * width)
    whole = logprob(logits, target, 1)
    value, gradient = whole.value, whole.gradient(upstream)
    for threads, size, rows in ((1, 2, 1), (1, 4, 3), (1, 8, 1), (1, 16, 3), (2, 1, 1), (2, 16, 1), (2, 16, 3)):
        torch.set_num_threads(threads)
        found = logprob(logits[:rows], target[:rows], size)
        assert same_bits(found.value, value[:rows]), (threads, size, rows)
        assert same_bits(found.gradient(upstream[:rows]), gradient[:rows]), (threads, size, rows)


@pytest.mark.on_kernels_too
@pytest.mark.parametrize("vocab", [1000, 48 * 7, 40_000])
def test_any_rows_where_shards_do_not_fit_the_tiles(vocab):
    """Bits across rows and ranks are promised for every vocabulary and every cut."""
    logits, target, upstream = draw(64, vocab)
    for size, widths in ((1, None), (2, None), (3, (vocab // 2, vocab // 4, vocab - vocab // 2 - vocab // 4))):
        many = logprob(logits, target, size, widths)
        value, gradient = many.value, many.gradient(upstream)
        for rows in (1, 3):
            few = logprob(logits[10 : 10 + rows], target[10 : 10 + rows], size, widths)
            assert same_bits(few.value, value[10 : 10 + rows])
            assert same_bits(few.gradient(upstream[10 : 10 + rows]), gradient[10 : 10 + rows])


@pytest.mark.parametrize("chunk_size", [1, 2, 7, 64, 1000])
def test_any_chunk(chunk_size):
    logits, target, upstream = draw(64, 16 * 200)
    whole = logprob(logits, target, 2)
    found = sharded(
        logits,
        2,
        lambda shard, start, end, group: ChunkedDistributedLogprob.apply(shard, target, start, end, chunk_size, group),
    )
    assert same_bits(found.value, whole.value)
    assert same_bits(found.gradient(upstream), whole.gradient(upstream))


@pytest.mark.on_kernels_too
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_alignment_and_stride(dtype):
    rows, vocab = 5, 16 * 501
    logits, target, upstream = draw(rows, vocab, dtype)
    whole = logprob(logits, target, 1)
    value, gradient = whole.value, whole.gradient(upstream)
    for offset, stride in ((1, vocab), (3, vocab + 7), (5, 2 * vocab + 1)):
        memory = torch.zeros(offset + rows * stride, dtype=dtype)
        view = memory.as_strided((rows, vocab), (stride, 1), offset)
        view.copy_(logits)
        view.requires_grad_()
        found = sharded(logits, 1, lambda _shard, a, b, g, x=view: logprob_of(x, target, a, b, g))
        assert same_bits(found.value, value)
        assert same_bits(torch.autograd.grad(found.value, view, upstream)[0], gradient)


def logprob_of(logits, target, start, end, group):
    return ChunkedDistributedLogprob.apply(logits, target, start, end, 3, group)


@pytest.mark.on_kernels_too
def test_skipped_rows_change_nothing_of_the_others():
    """Ignored rows and rows without incoming gradient leave gaps in the blocks."""
    logits, target, upstream = draw(64, 16 * 32)
    whole = logprob(logits, target, 2)
    value, gradient = whole.value, whole.gradient(upstream)
    for every in (2, 3, 63):
        kept = torch.arange(64) % every == 0
        masked = logprob(logits, torch.where(kept, target, -100), 2)
        assert same_bits(masked.value[kept], value[kept])
        assert same_bits(masked.gradient(upstream)[kept], gradient[kept])
        silent = logprob(logits, target, 2)
        assert same_bits(silent.gradient(torch.where(kept, upstream, 0.0))[kept], gradient[kept])


@pytest.mark.parametrize("width", [1, 501, SUBTILE_COLUMNS + 9])
def test_log_probability_with_entropy(width):
    rows = 3 if width > 1000 else 64
    logits, target, upstream = draw(rows, 16 * width)

    def call(shard, start, end, group):
        both = vocab_parallel_logprob_and_entropy(
            shard, target, group, vocab_start_index=start, vocab_end_index=end, temperature=0.7
        )
        return torch.stack(both)

    whole = sharded(logits, 1, call)
    value, gradient = whole.value, whole.gradient(torch.stack([upstream, upstream]))
    for size in (2, 4, 8, 16):
        found = sharded(logits, size, call)
        assert same_bits(found.value, value)
        assert same_bits(found.gradient(torch.stack([upstream, upstream])), gradient)


@pytest.mark.on_torch
def test_sub_tiles_are_below_the_sums_that_torch_splits_over_threads():
    assert SUBTILE_COLUMNS < 32_768
    assert BLOCK_ELEMENTS % SUBTILE_COLUMNS == 0


@pytest.mark.on_torch
def test_tp_invariant():
    assert all(tp_invariant(65_536, size) for size in (1, 2, 4, 8, 16))
    assert not tp_invariant(65_536, 3)
    assert not tp_invariant(65_536, 32)
    assert not tp_invariant(50_257, 1)
    for vocab, size in ((0, 1), (16, 0), (-16, 2)):
        with pytest.raises(ValueError, match="tp_invariant"):
            tp_invariant(vocab, size)
