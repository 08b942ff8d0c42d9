"""Tests on a real GPU with real NCCL; skipped, with the reason, where there is none.

python -m pytest tests/gpu -rs
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "jobs"))  # starting


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
        if REASON and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(scope="session")
def world() -> Iterator[Any]:
    """A world of one rank: NCCL is used all the same."""
    import cupy_coll as cc

    context = cc.CommContext()
    context.init_distributed_env(timeout=60)
    yield context.get_group("GLOBAL")
    context.destroy()
