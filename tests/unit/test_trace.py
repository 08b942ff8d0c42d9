"""``python -m cupy_coll trace``: what it makes of the files of all ranks, and of files that are missing or broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cupy_coll.__main__ import main
from cupy_coll.recorder import Recorder

Operation = dict[str, Any]

GLOBAL = {"channel": "0.data", "group": "GLOBAL [0, 1, 2]"}
PAIR = {"channel": "3.data", "group": "PAIR [2, 0]"}


def operation(op: str, number: int, start: float, end: float | None, **more: Any) -> Operation:
    """One line of a file; of all ranks unless ``more`` says otherwise. Times in seconds."""
    return (
        GLOBAL
        | {"sequence": 1, "kind": "collective", "number": number, "peer": None, "op": op, "dtype": None, "shape": None}
        | {"start": start * 1e6, "end": None if end is None else end * 1e6}
        | more
    )


def write(directory: Path, rank: int, operations: list[Operation], **more: Any) -> None:
    """A rank's file, written 10 s after the start; ``started`` follows from the operations unless it is given."""
    started: dict[str, Any] = {key: {"collective": 0, "send": {}, "recv": {}} for key in ("0.data", "3.data")}
    for one in operations:
        counts = started[one["channel"]]
        if one["peer"] is None:
            counts[one["kind"]] = one["number"] + 1
        else:
            counts[one["kind"]][str(one["peer"])] = one["number"] + 1
    content = {
        "version": 1,
        "job": "a job",
        "rank": rank,
        "world_size": 3,
        "host": f"node{rank}",
        "pid": 100 + rank,
        "reasons": ["timeout"],
        "zero": 0.0,
        "now": 10e6,
        "program": f"train.py:{10 + rank} in step",
        "stack": [],
        "members": {"0.data": [0, 1, 2], "3.data": [2, 0]},
        "started": started,
        "operations": operations,
    }
    (directory / f"rank{rank:05d}.json").write_text(json.dumps(content | more))


def report(directory: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["trace", str(directory), *words]) == 0
    return capsys.readouterr().out


def stuck(text: str) -> list[list[str]]:
    """Each stuck operation's lines."""
    return [["stuck: " + lines[0], *lines[1:]] for lines in map(str.splitlines, text.split("stuck: ")[1:])]


def test_nothing_is_stuck(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(3):
        write(tmp_path, rank, [operation("barrier", 0, 1, 2)], reasons=["SIGUSR1", "on request"])
    assert report(tmp_path, capsys).splitlines() == [
        "3 of 3 ranks wrote a file",
        *(f"rank {rank} on node{rank}: SIGUSR1; then on request" for rank in range(3)),
        "no operation is stuck: every one that was started has ended",
        "",
        f"wrote {tmp_path / 'trace.json'}",
    ]


def test_a_rank_that_has_not_come(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1 has done its part of the broadcast and gone on; rank 2 is somewhere else."""
    first = operation("all_reduce", 0, 1, 2, dtype="bfloat16", shape=[4, 8])
    broadcast = operation("broadcast", 1, 3, None, dtype="float32", shape=[5])
    write(tmp_path, 0, [first, broadcast])
    write(tmp_path, 1, [first, broadcast | {"end": 3.1e6}])
    write(tmp_path, 2, [first])
    (lines,) = stuck(report(tmp_path, capsys))
    assert lines[:4] == [
        "stuck: broadcast [5] float32 (group GLOBAL [0, 1, 2], operation 1)",
        "  waiting for up to 7.0 s: rank 0",
        "  rank 1: has done its part",
        "  rank 2: has not come; its last was all_reduce (group GLOBAL [0, 1, 2], operation 0), which ended 8.0 s "
        "before; it is at train.py:12 in step",
    ]


def test_two_groups_that_wait_for_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one that began first comes first."""
    write(tmp_path, 0, [operation("barrier", 0, 4, None)])
    write(tmp_path, 1, [operation("barrier", 0, 5, None)])
    write(tmp_path, 2, [operation("all_gather", 0, 2, None, **PAIR, dtype="int8", shape=[])])
    pair, everyone = stuck(report(tmp_path, capsys))
    assert pair[:3] == [
        "stuck: all_gather [] int8 (group PAIR [2, 0], operation 0)",
        "  waiting for up to 8.0 s: rank 2",
        "  rank 0: has not come; its last was barrier (group GLOBAL [0, 1, 2], operation 0), which has not ended; "
        "it is at train.py:10 in step",
    ]
    assert everyone[:3] == [
        "stuck: barrier (group GLOBAL [0, 1, 2], operation 0)",
        "  waiting for up to 6.0 s: ranks 0, 1",
        "  rank 2: has not come; its last was all_gather (group PAIR [2, 0], operation 0), which has not ended; "
        "it is at train.py:12 in step",
    ]


@pytest.mark.parametrize(("sent", "says"), [(0, "has not come"), (1, "has done its part")])
def test_a_message(sent: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers of messages are their own, apart from those of collectives and of other pairs."""
    done = [operation("barrier", number, number, number + 0.1) for number in range(3)]
    to_2 = operation("send", 0, 4, 4.1, kind="send", peer=2)
    to_0 = [operation("send", 0, 5, 5.1, kind="send", peer=0)] * sent
    write(tmp_path, 0, [*done, operation("recv", 0, 4, None, kind="recv", peer=1, dtype="float32", shape=[3])])
    write(tmp_path, 1, [*done, to_2, *to_0])
    write(tmp_path, 2, [*done, operation("recv", 0, 4, 4.1, kind="recv", peer=1)])
    (lines,) = stuck(report(tmp_path, capsys))
    assert lines[:2] == [
        "stuck: recv [3] float32 (group GLOBAL [0, 1, 2], operation 0, from rank 1)",
        "  waiting for up to 6.0 s: rank 0",
    ]
    assert lines[2].startswith(f"  rank 1: {says}")
    if not sent:
        assert "its last was send (group GLOBAL [0, 1, 2], operation 0, to rank 2), which ended" in lines[2]
    assert not any("rank 2" in line for line in lines[3:])


def test_messages_and_collectives_do_not_mix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the same number, on the same channel."""
    write(tmp_path, 0, [operation("barrier", 0, 4, None)])
    for rank, peer in ((1, 2), (2, 1)):
        write(tmp_path, rank, [operation("recv", 0, 4 + rank, None, kind="recv", peer=peer)])
    first_lines = [lines[0] for lines in stuck(report(tmp_path, capsys))]
    assert first_lines == [
        "stuck: barrier (group GLOBAL [0, 1, 2], operation 0)",
        "stuck: recv (group GLOBAL [0, 1, 2], operation 0, from rank 2)",
        "stuck: recv (group GLOBAL [0, 1, 2], operation 0, from rank 1)",
    ]


def test_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, [operation("barrier", 0, 4, None)])
    write(tmp_path, 2, [])
    text = report(tmp_path, capsys)
    assert text.splitlines()[:2] == [
        "2 of 3 ranks wrote a file",
        "no file of rank 1: killed, or busy outside Python",
    ]
    assert stuck(text)[0][2:4] == [
        "  rank 1: no file",
        "  rank 2: has not come; it has recorded no operation, and is at train.py:12 in step",
    ]


def test_operations_that_are_no_longer_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that is a thousand operations ahead has done its part all the same."""
    write(tmp_path, 0, [operation("broadcast", 3, 4, None)])
    write(tmp_path, 1, [operation("broadcast", 3, 5, None)])
    write(tmp_path, 2, [], started={"0.data": {"collective": 2000, "send": {}, "recv": {}}})
    assert stuck(report(tmp_path, capsys))[0][2] == "  rank 2: has done its part"


@pytest.mark.parametrize(
    "content",
    ["", "[1", '{"rank": 0}', "[]", '"text"', b"\xff\xfe\x00"],
    ids=["empty", "cut off", "other keys", "a list", "a string", "no text"],
)
def test_a_broken_file(content: str | bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, [])
    path = tmp_path / "rank00001.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["trace", str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"trace: {path} is not a file of the flight recorder: ")
    assert output.out == ""


def test_files_of_two_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, [])
    write(tmp_path, 1, [], job="an older one")
    assert main(["trace", str(tmp_path)]) == 2
    assert f"the files in {tmp_path} are of different jobs" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["empty", "not there"])
def test_no_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["trace", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err == f"trace: no rank*.json in {tmp_path / name}\n"


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A process a rank, a track a group; what has not ended lasts until the file was written."""
    gather = operation("all_gather", 4, 2, 2.5, **PAIR, sequence=9, dtype="int8", shape=[3])
    write(tmp_path, 0, [operation("barrier", 0, 1, 2), gather, operation("barrier", 1, 4, None)])
    write(tmp_path, 2, [gather])
    out = tmp_path / "elsewhere.json"
    assert f"wrote {out}" in report(tmp_path, capsys, "--out", str(out))
    picture = json.loads(out.read_text())
    names = [event for event in picture["traceEvents"] if event["ph"] == "M"]
    assert [(event["name"], event["pid"], event["tid"], event["args"]["name"]) for event in names] == [
        ("process_name", 0, 0, "rank 0 on node0"),
        ("thread_name", 0, 0, "GLOBAL [0, 1, 2]"),
        ("thread_name", 0, 1, "PAIR [2, 0]"),
        ("process_name", 2, 0, "rank 2 on node2"),
        ("thread_name", 2, 0, "PAIR [2, 0]"),
    ]
    spans = [event for event in picture["traceEvents"] if event["ph"] == "X"]
    assert [(event["name"], event["pid"], event["tid"], event["ts"], event["dur"]) for event in spans] == [
        ("barrier", 0, 0, 1e6, 1e6),
        ("all_gather", 0, 1, 2e6, 0.5e6),
        ("barrier (not ended)", 0, 0, 4e6, 6e6),
        ("all_gather", 2, 0, 2e6, 0.5e6),
    ]
    assert spans[1]["args"] == {
        "sequence": 9, "kind": "collective", "number": 4, "peer": None, "dtype": "int8", "shape": [3],
    }  # fmt: skip


def test_files_of_the_recorder_itself(tmp_path: Path) -> None:
    """As a command, on what recorders write."""
    for rank in range(2):
        recorder = Recorder(rank, 2)
        recorder.members["0.data"] = (0, 1)
        recorder.set_zero("a job")
        if rank == 0:
            recorder.begin("0.data", "GLOBAL [0, 1]", "collective", 0, None, "all_reduce", [torch.ones(2, 3)])
        recorder.dump(tmp_path, "on request", {"0.data": {"collective": 1 - rank}})
    command = [sys.executable, "-m", "cupy_coll", "trace", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "stuck: all_reduce [2, 3] float32 (group GLOBAL [0, 1], operation 0)\n" in done.stdout
    assert "  rank 1: has not come; it has recorded no operation, and is at test_trace.py:" in done.stdout
