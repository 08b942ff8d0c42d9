"""Tests on a real GPU with real NCCL; skipped, with the reason, where there is none.

python -m pytest tests/gpu -rs

GPU_CHECK_DRY_RUN=1 runs those of the kernels on the processor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), *(str(TESTS / name) for name in ("jobs", "unit"))]  # starting; logprob_ranks


def why_not() -> str:
    """What is missing, in words; empty where nothing is."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    from cupy_coll.errors import TransportError
    from cupy_coll.transport.nccl import _binding

    try:
        _binding()
    except TransportError as error:
        return str(error)
    return ""


REASON = why_not()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        dry_run = os.environ.get("GPU_CHECK_DRY_RUN") and item.path.name == "test_kernels_on_gpu.py"
        if REASON and not dry_run and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(scope="session")
def world() -> Iterator[Any]:
    """A world of one rank: NCCL is used all the same."""
    import cupy_coll as cc

    context = cc.CommContext()
    context.init_distributed_env(timeout=60)
    yield context.get_group("GLOBAL")
    context.destroy()
