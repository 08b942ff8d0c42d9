"""Runs the tests of this directory on all ranks of one MPI job together, by the harness of ``tests/ranks``.

    mpiexec -n 4 python -c 'from mpi4py import MPI, run; run.main()' -m pytest tests/nccl

What they run on is **not NCCL** and no GPU: CuPy's real binding calls a stand-in library on host memory
(``tests/nccl_standin``), and a fake device (``fake_device.py``) owns the CPU tensors. They show that the transport
calls NCCL as it must, and what it makes of NCCL's answers; not how NCCL computes, performs or fails.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "ranks"), str(TESTS / "nccl")]  # nccl_standin; support; fake_device

specification = importlib.util.spec_from_file_location("ranks_harness", TESTS / "ranks" / "conftest.py")
assert specification is not None
assert specification.loader is not None
harness = importlib.util.module_from_spec(specification)
sys.modules["ranks_harness"] = harness
specification.loader.exec_module(harness)
# Its hooks and fixtures are this directory's too.
globals().update({name: value for name, value in vars(harness).items() if not name.startswith("_")})

os.environ.setdefault("NCCL_STANDIN_TIMEOUT", "15")
import nccl_standin  # noqa: E402

standin = nccl_standin.load()  # before anything imports CuPy's binding

from fake_device import FakeDevice  # noqa: E402

from cupy_coll import device  # noqa: E402

fake_device = FakeDevice(standin, gpu=f"GPU-{harness.RANK}")


@pytest.fixture(scope="session", autouse=True)
def installed_device() -> Iterator[None]:
    with device.installed(fake_device):
        yield


@pytest.fixture
def fake(world: Any) -> Iterator[FakeDevice]:
    """CPU tensors go to NCCL's stand-in during the test."""
    fake_device.enabled = fake_device.recording = True
    standin.clear()
    fake_device._calls = 0
    fake_device.take_log()
    yield fake_device
    standin.hold(False)
    standin.asynchronous(False)
    fake_device.__dict__.update(
        enabled=False, recording=False, holding=False, capturing=False, sm=(9, 0), gpu=f"GPU-{harness.RANK}"
    )


@pytest.fixture(params=["host", "nccl"])
def transport(request: pytest.FixtureRequest, world: Any) -> Iterator[str]:
    """Each test twice: CPU tensors go to the host's transport, or to NCCL's over the stand-in."""
    fake_device.enabled = request.param == "nccl"
    standin.clear()
    yield request.param
    fake_device.enabled = False


def pytest_report_header() -> list[str]:
    return [f"ranks: {harness.SIZE}", "NCCL: a stand-in on host memory, NOT NCCL (tests/nccl_standin)"]
