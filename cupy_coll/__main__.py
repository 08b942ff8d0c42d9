"""``python -m cupy_coll``: the tools of the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from cupy_coll import doctor, trace
from cupy_coll.errors import ArgumentError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a tool; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m cupy_coll", description="Tools of cupy_coll.")
    tools = parser.add_subparsers(dest="tool", required=True)
    merge = tools.add_parser(
        "trace",
        help="merge the flight recorder's files of all ranks",
        description="Say which operation is stuck, which ranks have not come to it and what they did last, and write "
        "all ranks' operations to one file that https://ui.perfetto.dev and chrome://tracing open.",
    )
    merge.add_argument("directory", type=Path, help="where the ranks wrote rank*.json (CUPY_COLL_TRACE_DIR)")
    merge.add_argument("--out", type=Path, help="the merged file (default: DIRECTORY/trace.json)")
    examine = tools.add_parser(
        "doctor",
        help="say what a job has here (MPI, launcher, GPUs, NCCL) and whether it works, with advice",
        description="Look at what a job has where this is started, alone or on all ranks of one "
        "(mpiexec -n 4 python -m cupy_coll doctor), try tiny collectives, and give advice on each problem. The status "
        "is 1 where there is a problem.",
    )
    examine.add_argument("--json", action="store_true", help="the report for programs")
    examine.add_argument(
        "--timeout",
        type=_seconds,
        default=doctor.TIMEOUT,
        metavar="SECONDS",
        help="for each step (default: %(default)g)",
    )
    chosen = parser.parse_args(arguments)
    if chosen.tool == "doctor":
        return doctor.run(chosen.json, chosen.timeout)
    return _trace(chosen)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text}")
    return value


def _trace(chosen: argparse.Namespace) -> int:
    try:
        dumps = trace.read(chosen.directory)
        print(trace.report(dumps))
        out = chosen.out or chosen.directory / "trace.json"
        out.write_text(json.dumps(trace.perfetto(dumps)))
        print(f"\nwrote {out}")
    except (ArgumentError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
