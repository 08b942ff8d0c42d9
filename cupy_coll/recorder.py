"""The flight recorder: the last operations of this process, in memory until somebody wants to see them."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["Recorder", "where_the_program_is"]

LENGTH = 1000
WALKS = 10  # over the main thread's frames
PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")

# One operation: what a dump writes, in its order. A list, because its last field is filled in at the end.
# kind: collective, send, recv or check; numbers count by channel, kind and (send, recv) peer, a global rank.
FIELDS = ("sequence", "channel", "group", "kind", "number", "peer", "op", "dtype", "shape", "start", "end")
END = FIELDS.index("end")


class Recorder:
    """A ring of the last 1,000 operations.

    Times are nanoseconds of ``time.perf_counter_ns``; a dump gives them in microseconds since :meth:`set_zero`.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.job = ""
        self.rank = rank
        self.size = size
        self.entries: deque[list[Any]] = deque(maxlen=LENGTH)
        self.members: dict[str, Sequence[int]] = {}
        self.reasons: list[str] = []
        self._sequence = 0
        self._zero = time.perf_counter_ns()
        self._zero_wall = time.time()

    def set_zero(self, job: str) -> None:
        """Begin the record of ``job`` at time 0.

        Called by every process on leaving the same barrier, which aligns the clocks of their hosts.
        """
        self.job = job
        self._zero = time.perf_counter_ns()
        self._zero_wall = time.time()
        self.entries.clear()

    def begin(
        self, channel: str, group: str, kind: str, number: int, peer: int | None, op: str, tensors: Sequence[Any]
    ) -> list[Any]:
        """Record a start; the caller passes the entry to :meth:`end`."""
        self._sequence += 1
        dtype, shape = (tensors[0].dtype, tensors[0].shape) if tensors else (None, None)
        now = time.perf_counter_ns()
        entry = [self._sequence, channel, group, kind, number, peer, op, dtype, shape, now, None]
        self.entries.append(entry)
        return entry

    @staticmethod
    def end(entry: list[Any]) -> None:
        """Record the end of an operation."""
        entry[END] = time.perf_counter_ns()

    def last(self) -> str:
        """The last operation, and where the program is, in words."""
        program = f"the program is at {where_the_program_is()}"
        if not self.entries:
            return f"no operation yet; {program}"
        _, _, group, kind, number, peer, op, _, _, start, end = self.entries[-1]
        where = f"group {group}, operation {number}"
        if peer is not None:
            where += f", {'to' if kind == 'send' else 'from'} rank {peer}"
        if end is None:
            state = f"in it for {(time.perf_counter_ns() - start) / 1e9:.1f} s"
        else:
            state = f"ended {(time.perf_counter_ns() - end) / 1e9:.1f} s ago"
        return f"last operation {op} ({where}), {state}; {program}"

    def dump(self, directory: str | os.PathLike[str], reason: str, started: Mapping[str, Any]) -> Path:
        """Write everything to ``directory/rank<RANK>.json``, whole or not at all; return the path.

        Args:
            reason: why it is written.
            started: for each channel how many operations of each kind have been started: "collective" and "check"
                give a number, "send" and "recv" a number by peer.
        """
        self.reasons.append(reason)
        path = Path(directory) / f"rank{self.rank:05d}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "version": 1,
            "job": self.job,
            "rank": self.rank,
            "world_size": self.size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "reasons": self.reasons,
            "zero": self._zero_wall,
            "now": self._microseconds(time.perf_counter_ns()),
            "program": where_the_program_is(),
            "stack": traceback.format_stack(_main_frame()),
            "members": {channel: list(ranks) for channel, ranks in self.members.items()},
            "started": started,
            "operations": [self._readable(entry) for entry in list(self.entries)],
        }
        # Two threads may write at once: each its own file, and the last one to end stays.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.stem}.", delete=False) as unfinished:
            json.dump(content, unfinished)
        Path(unfinished.name).replace(path)
        return path

    def _readable(self, entry: list[Any]) -> dict[str, Any]:
        readable = dict(zip(FIELDS, entry, strict=True))
        readable["dtype"] = str(readable["dtype"]).removeprefix("torch.") if readable["dtype"] else None
        readable["shape"] = None if readable["shape"] is None else list(readable["shape"])
        for field in ("start", "end"):
            if readable[field] is not None:
                readable[field] = self._microseconds(readable[field])
        return readable

    def _microseconds(self, nanoseconds: int) -> float:
        return (nanoseconds - self._zero) / 1e3


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def where_the_program_is() -> str:
    """``train.py:42 in step``: the innermost frame of the main thread that is not in this package."""
    # Another thread asks while the main thread runs on: where it returns from the frame in hand, the walk ends early.
    for _ in range(WALKS):
        frame = _main_frame()
        while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        if frame is not None:
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
    return "an unknown place"
