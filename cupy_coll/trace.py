"""Merging the flight recorder's files of all ranks: what is stuck, who misses, and a picture for Perfetto."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cupy_coll.check import ranks_in_words
from cupy_coll.errors import ArgumentError

__all__ = ["perfetto", "read", "report"]

Dump = dict[str, Any]
KEYS = ("job", "rank", "world_size", "host", "reasons", "now", "program", "members", "started", "operations")


def read(directory: str | Path) -> dict[int, Dump]:
    """The files ``rank*.json`` of a directory, by rank.

    Raises:
        ArgumentError: there are none, one cannot be read, or they are not of one job.
    """
    dumps: dict[int, Dump] = {}
    for path in sorted(Path(directory).glob("rank*.json")):
        try:
            dump = json.loads(path.read_text())
            dumps[dump["rank"]] = {key: dump[key] for key in KEYS}
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentError(f"trace: {path} is not a file of the flight recorder: {error}") from error
    if not dumps:
        raise ArgumentError(f"trace: no rank*.json in {directory}")
    if len({dump["job"] for dump in dumps.values()}) > 1:
        raise ArgumentError(f"trace: the files in {directory} are of different jobs; remove the old ones")
    return dumps


def report(dumps: dict[int, Dump]) -> str:
    """Which operation is stuck, which ranks have not come to it, and what those did last."""
    size = max(dump["world_size"] for dump in dumps.values())
    lines = [f"{len(dumps)} of {size} ranks wrote a file"]
    absent = [rank for rank in range(size) if rank not in dumps]
    if absent:
        lines.append(f"no file of {ranks_in_words(absent)}: killed, or busy outside Python")
    for rank, dump in sorted(dumps.items()):
        lines.append(f"rank {rank} on {dump['host']}: {'; then '.join(dump['reasons'])}")
    stuck = _stuck(dumps)
    if not stuck:
        lines.append("no operation is stuck: every one that was started has ended")
    for waiting in sorted(stuck.values(), key=lambda entries: min(op["start"] for op in entries.values())):
        lines += _explain(dumps, waiting)
    return "\n".join(lines)


def _stuck(dumps: dict[int, Dump]) -> dict[tuple[Any, ...], dict[int, Dump]]:
    """The operations that have not ended on some rank: for each the entries of the ranks that wait in it."""
    stuck: dict[tuple[Any, ...], dict[int, Dump]] = defaultdict(dict)
    for rank, dump in dumps.items():
        for operation in dump["operations"]:
            if operation["end"] is None:
                # Disjoint groups that were made together have channels of one key.
                ranks = (
                    dump["members"][operation["channel"]] if operation["peer"] is None else [rank, operation["peer"]]
                )
                key = (operation["channel"], operation["kind"], operation["number"], *ranks)
                stuck[key][rank] = operation
    return stuck


def _explain(dumps: dict[int, Dump], waiting: dict[int, Dump]) -> Iterable[str]:
    rank, operation = next(iter(waiting.items()))
    shape = "" if operation["shape"] is None else f" {operation['shape']} {operation['dtype']}"
    yield f"\nstuck: {operation['op']}{shape} ({_place(operation)})"
    seconds = max((dumps[rank]["now"] - op["start"]) / 1e6 for rank, op in waiting.items())
    yield f"  waiting for up to {seconds:.1f} s: {ranks_in_words(sorted(waiting))}"
    members = dumps[rank]["members"].get(operation["channel"], [])
    for member in members if operation["peer"] is None else [operation["peer"]]:
        if member in waiting:
            continue
        if member not in dumps:
            yield f"  rank {member}: no file"
        elif _started(dumps[member], rank, operation) > operation["number"]:
            yield f"  rank {member}: has done its part"
        else:
            yield f"  rank {member}: has not come; {_last(dumps[member])}"


def _started(dump: Dump, rank: int, operation: Dump) -> int:
    """How many operations of the kind that belongs to ``operation`` of ``rank`` another rank has started."""
    counts = dump["started"].get(operation["channel"], {})
    if operation["peer"] is None:
        return int(counts.get(operation["kind"], 0))
    other_end = "recv" if operation["kind"] == "send" else "send"
    return int(counts.get(other_end, {}).get(str(rank), 0))


def _place(operation: Dump) -> str:
    peer = ""
    if operation["peer"] is not None:
        peer = f", {'to' if operation['kind'] == 'send' else 'from'} rank {operation['peer']}"
    return f"group {operation['group']}, operation {operation['number']}{peer}"


def _last(dump: Dump) -> str:
    if not dump["operations"]:
        return f"it has recorded no operation, and is at {dump['program']}"
    operation = dump["operations"][-1]
    if operation["end"] is None:
        when = "which has not ended"
    else:
        when = f"which ended {(dump['now'] - operation['end']) / 1e6:.1f} s before"
    return f"its last was {operation['op']} ({_place(operation)}), {when}; it is at {dump['program']}"


def perfetto(dumps: dict[int, Dump]) -> dict[str, Any]:
    """All ranks' operations in the Chrome trace event format: a process a rank, a track a group.

    Source of the format: "Trace Event Format", Google, 2016; https://ui.perfetto.dev opens it.
    """
    events: list[dict[str, Any]] = []
    for rank, dump in sorted(dumps.items()):
        events.append(_metadata("process_name", rank, 0, f"rank {rank} on {dump['host']}"))
        tracks: dict[str, int] = {}
        for operation in dump["operations"]:
            track = tracks.setdefault(operation["group"], len(tracks))
            if track == len(tracks) - 1:
                events.append(_metadata("thread_name", rank, track, operation["group"]))
            end = dump["now"] if operation["end"] is None else operation["end"]
            events.append(
                {
                    "name": operation["op"] + (" (not ended)" if operation["end"] is None else ""),
                    "ph": "X",
                    "pid": rank,
                    "tid": track,
                    "ts": operation["start"],
                    "dur": end - operation["start"],
                    "args": {key: operation[key] for key in ("sequence", "kind", "number", "peer", "dtype", "shape")},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata(name: str, rank: int, track: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": rank, "tid": track, "args": {"name": value}}
