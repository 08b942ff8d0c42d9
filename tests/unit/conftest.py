"""Runs the tests of log-probabilities twice: computed by torch, and by the CUDA kernels on the processor."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kernels_on_host.device import HostDevice


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "on_torch: holds, or means something, only where torch computes")
    config.addinivalue_line("markers", "on_kernels_too: runs on the kernels also without --slow")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Modules that use ``computed_by`` get their tests for both; most of those on kernels are slow."""
    if "computed_by" not in metafunc.fixturenames:
        return
    marks = metafunc.definition.get_closest_marker
    params = ["torch"]
    if not marks("on_torch"):
        params.append(pytest.param("kernels", marks=[] if marks("on_kernels_too") else pytest.mark.slow))
    metafunc.parametrize("computed_by", params, indirect=True)


@pytest.fixture
def computed_by(request: pytest.FixtureRequest) -> Iterator[str]:
    """``torch``, or ``kernels``: then CPU tensors are a device's that runs the kernels."""
    if request.param == "torch":
        yield request.param
        return
    with HostDevice().installed():
        yield request.param
