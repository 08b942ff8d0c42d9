"""Rows in memory order: views whatever the layout, each row once, and its own number."""

from __future__ import annotations

import pytest
import torch

from cupy_coll.logprob.rows import Rows, row_blocks

BASE = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
LAYOUTS = {
    "contiguous": (BASE, 1),
    "transposed": (BASE.transpose(0, 2), 1),
    "permuted": (BASE.permute(1, 2, 0, 3), 1),
    "sliced": (BASE[:, :, :-1], 6),
    "sliced twice": (BASE[:, 1:, :-1], 4),
    "sliced, transposed": (BASE[:, :, 1:].transpose(0, 1), 6),
    "outer slice": (BASE[1:, 1:], 1),
    "narrow": (BASE[..., 1:3], 1),
    "columns outermost": (BASE.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0), 1),
    "expanded": (BASE[:1, :1].expand(2, 3, 4, 5), 4),
    "single rows": (BASE[:, :1, :1], 1),
    "one row": (BASE[0, 0, 0], 1),
    "no rows": (BASE[:, :0], 0),
    "no columns": (BASE[..., :0], 1),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_runs_are_views_and_cover_every_row_once(name):
    tensor, longest = LAYOUTS[name]
    rows = Rows(tensor)
    numbers = torch.arange(rows.count).view(tensor.shape[:-1])
    in_memory_order = rows.flatten(numbers)
    runs = list(rows.runs(tensor))
    assert len(runs) == longest
    seen = []
    for first, (view,) in runs:
        assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        assert first == len(seen)
        for row in view:
            number = int(in_memory_order[len(seen)])
            assert torch.equal(row, tensor.reshape(rows.count, tensor.shape[-1])[number])
            seen.append(number)
    assert sorted(seen) == list(range(rows.count))
    assert torch.equal(rows.restore(in_memory_order), numbers.reshape(-1))
    assert torch.equal(rows.restore(rows.flatten(tensor)), tensor.reshape(rows.count, tensor.shape[-1]))


def test_runs_of_two_tensors_end_where_either_ends():
    dense, sliced = torch.zeros(3, 4, 5), torch.zeros(3, 6, 5)[:, :4]
    assert [first for first, _ in Rows(dense).runs(dense, sliced)] == [0, 4, 8]


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_row_blocks(step):
    values = torch.arange(10)
    for active in (None, torch.ones(10, dtype=torch.bool), values % 3 == 1, values > 6, values > 100):
        blocks = list(row_blocks(10, step, active))
        kept = values if active is None else values[active]
        assert torch.equal(torch.cat([values[block] for block in blocks] or [values[:0]]), kept)
        assert all(values[block].numel() <= step for block in blocks)
    assert all(isinstance(block, slice) for block in row_blocks(10, step, values > 6))
    assert list(row_blocks(0, step)) == []
