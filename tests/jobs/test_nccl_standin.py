"""The stand-in for NCCL (tests/nccl_standin): through CuPy's own binding on 2, 3 and 4 ranks; alone under sanitizers.

The stand-in is not NCCL: these tests say that it can be trusted as one where the project's tests use it.
"""

from __future__ import annotations

import re
import subprocess

import nccl_standin
import pytest
from starting import run_command


@pytest.mark.parametrize("n", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_checks(job, n):
    """Values to the bit, groups, communicators, failures, the log: see the checks themselves."""
    result = job(nccl_standin.HERE / "checks.py", n=n, how="runner", limit=100)
    counts = re.search(r"^(\d+) of (\d+) checks passed$", result.output, re.MULTILINE)
    assert counts, result.output
    assert counts[1] == counts[2], result.output
    assert int(counts[1]) > 30
    assert result.status == 0, result.output


def test_under_sanitizers(tmp_path):
    """Three processes without Python or MPI, with memory errors and undefined behaviour made fatal."""
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    tried = [["cc", *nccl_standin.SANITIZERS, str(probe), "-o", str(tmp_path / "probe")], [str(tmp_path / "probe")]]
    for command in tried:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            pytest.skip(f"this C compiler has no sanitizers: {done.stderr.strip()}")
    result = run_command([str(nccl_standin.build_driver())], limit=60)
    assert result.status == 0, result.output
    assert "nothing wrong" in result.output
