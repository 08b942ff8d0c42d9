"""What is refused before anything is sent, and what fails before NCCL connects: every rank raises, the job goes on."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from conftest import standin
from torch.distributed import ReduceOp

import cupy_coll as cc
from cupy_coll.transport import nccl as transport_module


@pytest.fixture
def fresh(fake, size):
    """A group of all ranks that NCCL has not connected."""
    with mock.patch.object(transport_module.NcclTransport, "can_split", return_value=False):
        group = cc.CommContext().init_group(list(range(size)), "FRESH")
    yield group
    fake.enabled = False
    group.close()


REFUSED = [
    (torch.bool, ["AVG", "BAND", "BOR", "BXOR"]),
    (torch.int32, ["BAND", "BOR", "BXOR"]),
    (torch.int16, ["SUM", "MAX"]),
    (torch.uint16, ["SUM", "MAX"]),
    (torch.complex64, ["MAX", "MIN", "PRODUCT"]),
    (torch.float32, ["BAND"]),
    (torch.float8_e4m3fnuz, ["SUM"]),
]


@pytest.mark.parametrize(("dtype", "ops"), REFUSED, ids=[str(dtype).removeprefix("torch.") for dtype, _ in REFUSED])
def test_reductions(fake, world, size, raises_everywhere, expect, dtype, ops):
    tensor, part = torch.ones(size).to(dtype), torch.ones(1).to(dtype)
    before = world.sequence
    for op in ops:
        reduction = getattr(ReduceOp, op)
        with raises_everywhere(cc.DTypeError, "all_reduce.*" + str(dtype).removeprefix("torch.")):
            cc.all_reduce(tensor, world, reduction)
        with raises_everywhere(cc.DTypeError, "reduce"):
            cc.reduce(tensor, world, op=reduction)
        with raises_everywhere(cc.DTypeError, "reduce_scatter"):
            cc.reduce_scatter(part, tensor, world, reduction)
    expect(standin.data_calls(), [], "something was sent")
    expect(world.sequence - before, 3 * len(ops), "the barriers alone")


def test_float8_on_older_gpus(fake, world, raises_everywhere):
    fake.sm = (8, 0)
    with raises_everywhere(cc.DTypeError, r"float8_e4m3fn.*9\.0 on; this GPU has 8\.0"):
        cc.all_reduce(torch.ones(2).to(torch.float8_e4m3fn), world)


def test_host_only_groups(fake, size, raises_everywhere):
    group = cc.CommContext().init_group(list(range(size)), "HOST_ONLY", use_cpu=True)
    with raises_everywhere(cc.ArgumentError, "HOST_ONLY.*use_cpu"):
        cc.all_reduce(torch.ones(2), group)
    group.warm_up()
    fake.enabled = False
    group.close()


def goes_on(fake, group, size, expect):
    """The same group on the host, then over NCCL, when the cause is gone."""
    fake.enabled = False
    tensor = torch.ones(2)
    cc.all_reduce(tensor, group)
    expect(tensor, torch.full((2,), float(size)), "on the host")
    fake.enabled = True
    fake.gpu = f"GPU-{cc.CommContext().get_global_rank()}"
    tensor = torch.ones(2)
    cc.all_reduce(tensor, group)
    expect(tensor, torch.full((2,), float(size)), "over NCCL")


def test_two_ranks_on_one_gpu(fake, fresh, size, rank, expect, raises_everywhere):
    if size == 1:
        pytest.skip("needs 2 ranks")
    fake.gpu = f"GPU-{min(rank, size - 2)}"
    with raises_everywhere(
        cc.TransportError, rf"ranks {size - 2}, {size - 1} are on the same GPU.*set_device.*MULTI_RANK"
    ):
        cc.all_reduce(torch.ones(2), fresh)
    with raises_everywhere(cc.TransportError, "warm_up.*same GPU"):
        fresh.warm_up()
    with (
        mock.patch.dict(os.environ, NCCL_MULTI_RANK_GPU_ENABLE="1"),
        mock.patch.dict(os.environ, NCCL_STANDIN_VERSION="22899"),
        raises_everywhere(cc.TransportError, r"2\.28\.99 wants one GPU a rank.*NCCL 2\.30"),
    ):
        cc.all_reduce(torch.ones(2), fresh)
    with mock.patch.dict(os.environ, NCCL_MULTI_RANK_GPU_ENABLE="1"):
        shared = cc.CommContext().init_group(list(range(size)), "SHARED_GPU")
        tensor = torch.ones(2)
        cc.all_reduce(tensor, shared)
        expect(tensor, torch.full((2,), float(size)), "sharing allowed")
        shared.close()
    goes_on(fake, fresh, size, expect)


def test_mixed_versions(fake, fresh, size, rank, expect, raises_everywhere):
    if size == 1:
        pytest.skip("needs 2 ranks")
    version = "22807" if rank == size - 1 else "23004"
    with (
        mock.patch.dict(os.environ, NCCL_STANDIN_VERSION=version),
        raises_everywhere(cc.TransportError, rf"2\.30\.4 on rank.*; 2\.28\.7 on rank {size - 1}"),
    ):
        cc.broadcast(torch.ones(2), fresh)
    goes_on(fake, fresh, size, expect)


def test_unique_id(fake, fresh, size, rank, expect, raises_everywhere):
    """Rank 0 alone makes it; all raise its error, with NCCL's code."""
    with mock.patch.dict(os.environ, NCCL_STANDIN_FAIL_UNIQUE_ID="2" if rank == 0 else "0"):
        with pytest.raises(cc.TransportError) as caught:
            cc.all_reduce(torch.ones(2), fresh)
        expect(caught.value.code, 2)
        expect.that("ncclSystemError" in str(caught.value), str(caught.value))
        expect.that("/dev/shm" in str(caught.value), f"no advice: {caught.value}")
    goes_on(fake, fresh, size, expect)


def test_no_cupy_on_one_rank(fake, fresh, size, rank, expect, raises_everywhere):
    def absent():
        raise cc.TransportError("CuPy cannot be imported")

    binding = absent if rank == size - 1 else transport_module._binding
    with (
        mock.patch.object(transport_module, "_binding", binding),
        raises_everywhere(cc.TransportError, f"all_reduce: failed on rank {size - 1}: CuPy cannot be imported"),
    ):
        cc.all_reduce(torch.ones(2), fresh)
    goes_on(fake, fresh, size, expect)


def test_a_gpu_that_fails(fake, fresh, size, rank, expect, raises_everywhere):
    def fails(index):
        raise RuntimeError("no CUDA-capable device")

    if rank == 0:
        fake.identity = fails
    with raises_everywhere(cc.TransportError, "failed on rank 0: RuntimeError: no CUDA-capable device"):
        cc.all_reduce(torch.ones(2), fresh)
    fake.__dict__.pop("identity", None)
    goes_on(fake, fresh, size, expect)


def test_an_error_of_nccl(fake, size, rank, expect):
    """Its code, name and advice, also for a code that CuPy has no name for; other errors stay what they are."""
    for code, name in ((5, "ncclInvalidUsage"), (7, "ncclInProgress"), (13, "newer NCCL")):
        error = transport_module._translated("all_reduce", KeyError(code))
        expect((type(error), error.code), (cc.TransportError, code))
        expect.that(name in str(error), str(error))
    expect.that(type(transport_module._translated("x", ValueError("y"))) is ValueError, "not NCCL's")
    expect.that(type(transport_module._translated("x", KeyError("y"))) is KeyError, "not NCCL's")


def test_without_a_gpu(world, size, expect):
    """warm_up and everything else do without NCCL where there is no GPU."""
    group = cc.CommContext().init_group(list(range(size)), "NO_GPU")
    standin.clear()
    group.warm_up()
    tensor = torch.ones(1)
    cc.all_reduce(tensor, group)
    expect(tensor, torch.full((1,), float(size)))
    expect(standin.calls(), [])
    group.close()
