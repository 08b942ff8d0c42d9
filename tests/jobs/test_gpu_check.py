"""That the check for machines with a GPU would run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_check.sh"


@pytest.mark.slow
def test_dry_run():
    env = {**os.environ, "CUPY_COLL_PYTHON": sys.executable}
    done = subprocess.run(["bash", SCRIPT, "--dry-run"], capture_output=True, text=True, timeout=400, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout.split("A dry run, on a processor: no GPU was used.")[1]
    assert table.count("passed") == 3
    assert done.stdout.count("# wrong rows: 0") == 2
