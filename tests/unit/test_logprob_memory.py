"""Peak memory: beside the logits and their gradient only blocks, whatever the number of rows and columns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cupy_coll.logprob.memory import LARGE, empty_gradient

CHILD = """
import sys
import torch
from logprob_ranks import ThreadGroup
import threading
import cupy_coll

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) / 1024

def logits(rows, vocab):
    made = torch.empty(rows, vocab, dtype=getattr(torch, sys.argv[2]))
    for row in made:
        row.copy_(torch.arange(vocab) % 7)
    return made.requires_grad_()

group = ThreadGroup(0, 1, [None], threading.Barrier(1))

def forward(x):
    target = torch.zeros(len(x), dtype=torch.int64)
    if sys.argv[1] == "logprob":
        return cupy_coll.DistributedLogprob.apply(x, target, 0, x.shape[1], group)
    return sum(cupy_coll.vocab_parallel_logprob_and_entropy(
        x, target, group, vocab_start_index=0, vocab_end_index=x.shape[1], inplace_backward=sys.argv[1] == "inplace"))

forward(logits(16, 1 << 17)).sum().backward()  # code, scratch and thread pools are there now
x = logits(int(sys.argv[3]), 1 << 17)
before = peak()
value = forward(x)
after_forward = peak()
value.sum().backward()
print(after_forward - before, peak() - before, x.numel() * x.element_size() / 2**20)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
@pytest.mark.parametrize(
    ("function", "dtype", "rows"),
    [
        ("logprob", "bfloat16", 128),
        ("logprob", "bfloat16", 320),
        pytest.param("logprob", "float32", 128, marks=pytest.mark.slow),
        pytest.param("inplace", "bfloat16", 128, marks=pytest.mark.slow),
    ],
)
def test_peak_memory(function, dtype, rows):
    child = subprocess.run(
        [sys.executable, "-c", CHILD, function, dtype, str(rows)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join([str(Path(__file__).parent), *sys.path])},
    )
    forward, both, size = map(float, child.stdout.split())  # MiB
    assert size == rows * {"bfloat16": 0.25, "float32": 0.5}[dtype]
    blocks = 8.0  # a float32 copy of the bf16 logits would be 64 and more
    assert forward < blocks
    assert both < blocks + (0 if function == "inplace" else size)


def test_large_gradients_are_ordinary_tensors():
    """Below and above the size from which large pages are asked for, at any alignment, in the logits' layout."""
    for elements in (5, LARGE // 4 + 12_345):
        like = torch.empty(2, elements).t()
        gradient = empty_gradient(like)
        assert (gradient.shape, gradient.stride(), gradient.dtype) == (like.shape, like.stride(), like.dtype)
        gradient.fill_(2.0)
        assert float(gradient.sum(dtype=torch.float64)) == 4.0 * elements
