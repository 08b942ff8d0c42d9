"""NVRTC compiles every kernel for every target, and what the machine code shows of its speed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("cupy", reason="NVRTC is called by CuPy's binding")
specification = importlib.util.spec_from_file_location(
    "kernel_report", Path(__file__).resolve().parents[2] / "benchmarks" / "kernel_report.py"
)
assert specification is not None
assert specification.loader is not None
report = importlib.util.module_from_spec(specification)
sys.modules["kernel_report"] = report
specification.loader.exec_module(report)

H200 = "sm_90"
slow = pytest.mark.slow


def compiled(target: str, kernels: list) -> dict:
    found = {}
    for name in dict.fromkeys(kernel.name for kernel in kernels):
        found |= report.compile_for(target, [kernel for kernel in kernels if kernel.name == name])
    return found


@pytest.mark.parametrize(
    "target", [target if target in ("sm_75",) else pytest.param(target, marks=slow) for target in report.TARGETS]
)
@pytest.mark.parametrize("width", [16, *(pytest.param(width, marks=slow) for width in report.WIDTHS if width != 16)])
def test_every_instance_for_every_target_without_spills(target, width):
    for kernel, (name, log, cubin) in compiled(target, report.instances([width])).items():
        registers, spills, stack = report.resources_of(name, log)
        assert cubin.startswith(b"\x7fELF")
        assert (spills, stack) == (0, 0), kernel.expression
        assert registers <= (128 if ", 0, " in kernel.arguments else 64), kernel.expression


def test_a_mistake_in_a_source_is_told():
    class Broken(report.Kernel):
        source = "template <int> __global__ void broken(float* p) { *p = nowhere; }"

    with pytest.raises(RuntimeError, match=r"broken for sm_90: .*(\n.*)*nowhere"):
        report.compile_for(H200, [Broken("broken", "0")])


def test_budget_of_an_h200():
    """132 multiprocessors at 1.98 GHz beside 4.3 TB/s: 8.2 bf16 logits a cycle and multiprocessor."""
    instructions, exponentials = report.budget(2)
    assert instructions == pytest.approx(128 / 8.2, rel=0.01)
    assert exponentials == pytest.approx(16 / 8.2, rel=0.01)


@pytest.fixture(scope="module")
def facts() -> list:
    if not report.find_nvdisasm():
        pytest.skip("nvdisasm is missing (pip install nvidia-cuda-nvdisasm)")
    kernels = [k for k in report.instances() if k.name != "merge_partials" and "Half" not in k.arguments]  # as of Bf16
    return report.facts_of(H200, kernels)


def test_loads_and_stores_are_of_16_bytes(facts):
    for one in facts:
        assert one.loads == {16: report.VECTORS}, one.kernel.expression
        results = 2 if "Bf16, 16, Float" in one.kernel.arguments else 1
        written = {} if one.kernel.name == "softmax_partials" else {16: report.VECTORS * results}
        assert one.stores == written, one.kernel.expression


def test_instructions_and_exponentials_are_within_the_budget(facts):
    """Half of what an H200 issues while memory moves the bytes."""
    for one in facts:
        instructions, exponentials = report.budget(one.bytes_of_a_logit)
        assert 3 < one.instructions < 0.6 * instructions, one.kernel.expression
        needed = 0 if one.kernel.name == "log_softmax" else 1
        assert needed <= one.exponentials < 0.6 * exponentials, one.kernel.expression


def test_enough_bytes_in_flight(facts):
    """Latency x bandwidth of an H200 is about 25 KB a multiprocessor."""
    for one in facts:
        assert one.warps >= 32, one.kernel.expression
        assert one.in_flight >= 2 * 25_000, one.kernel.expression


def test_the_table(facts):
    lines = report.table(facts)
    assert len(lines) == 2 + len(facts)
    assert len({line.count("|") for line in lines}) == 1
