"""What members tell each other before NCCL connects them, and its table of types."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.distributed import ReduceOp

from cupy_coll import dtypes
from cupy_coll.errors import DTypeError
from cupy_coll.transport.nccl_members import Member, in_words, problem_of, warn_of_paths


def member(gpu: str, version: int = 22803, library: str = "/lib/libnccl.so.2", shares: bool = False) -> Member:
    return Member("node", gpu, version, library, shares)


def test_members_that_fit() -> None:
    assert problem_of([member("a"), member("b"), member("c")], [4, 5, 9]) == ""


def test_two_on_one_gpu() -> None:
    text = problem_of([member("a"), member("b"), member("a")], [4, 5, 9])
    assert text.startswith("ranks 4, 9 are on the same GPU (a of node), and NCCL 2.28.3 wants one GPU a rank")
    assert "set_device" in text
    assert "NCCL 2.30.0 or later" in text
    newer = [member("a", 23000, shares=True), member("a", 23000, shares=True)]
    assert problem_of(newer, [0, 1]) == ""
    some = [member("a", 23000, shares=True), member("a", 23000)]
    assert "set NCCL_MULTI_RANK_GPU_ENABLE=1 on all ranks" in problem_of(some, [0, 1])
    older = [member("a", 22999, shares=True), member("a", 22999, shares=True)]
    assert "same GPU" in problem_of(older, [0, 1])


def test_versions() -> None:
    text = problem_of([member("a"), member("b", 23210), member("c")], [0, 1, 2])
    assert "2.28.3 on ranks 0, 2; 2.32.10 on rank 1" in text
    assert in_words(22803) == "2.28.3"


def test_paths_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "cupy_coll"):
        warn_of_paths([member("a"), member("b")], [0, 1])
        assert not caplog.records
        warn_of_paths([member("a"), member("b", library="")], [0, 1])
    assert "/lib/libnccl.so.2 on rank 0; unknown on rank 1" in caplog.text


def test_types() -> None:
    """NCCL's codes, and what an element of a type that it lacks is to it."""
    assert dtypes.nccl_copy(torch.bfloat16) == dtypes.NcclType(9)
    assert dtypes.nccl_copy(torch.complex64) == dtypes.NcclType(1, 8)
    assert dtypes.nccl_copy(torch.int16) == dtypes.NcclType(1, 2)
    for op, code in (("SUM", 0), ("PRODUCT", 1), ("MAX", 2), ("MIN", 3), ("AVG", 4)):
        kind = dtypes.nccl_reduction("all_reduce", torch.float32, getattr(ReduceOp, op), (7, 5))
        assert kind == dtypes.NcclType(7, op=code)
    assert dtypes.nccl_reduction("f", torch.complex128, ReduceOp.AVG, (7, 5)) == dtypes.NcclType(8, 2, 4)
    assert dtypes.nccl_reduction("f", torch.bool, ReduceOp.SUM, (7, 5)) == dtypes.NcclType(1, 1, 2, True)
    assert dtypes.nccl_reduction("f", torch.bool, ReduceOp.PRODUCT, (7, 5)) == dtypes.NcclType(1, 1, 3, True)
    assert dtypes.nccl_reduction("f", torch.float8_e5m2, ReduceOp.SUM, (9, 0)) == dtypes.NcclType(11, op=0)
    with pytest.raises(DTypeError, match="f: tensor is float8_e5m2, and NCCL"):
        dtypes.nccl_reduction("f", torch.float8_e5m2, ReduceOp.SUM, (8, 9))
