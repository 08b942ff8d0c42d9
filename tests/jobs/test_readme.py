"""The example in the README runs as it stands there."""

from __future__ import annotations

import re
from collections.abc import Callable

from starting import ROOT, Finished


def test_the_example_of_the_readme_runs(job: Callable[..., Finished]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 1
    ended = job(blocks[0], n=4)
    assert ended.status == 0, ended.output
    means = dict(re.findall(r"rank (\d): \[2, 7\], mean (-\d+\.\d+)", ended.output))
    assert sorted(means) == list("0123"), ended.output
    assert (means["0"], means["2"]) == (means["1"], means["3"])
    assert means["0"] != means["2"]
    assert -11.5 < float(means["0"]) < -9.5  # untrained: near -log(32,000) = -10.4
