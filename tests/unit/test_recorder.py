"""The flight recorder: what it keeps, what its file says, and what it says of a program in words."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import cupy_coll.recorder
from cupy_coll.recorder import LENGTH, Recorder, where_the_program_is


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time in nanoseconds, set by the test."""
    now = [1_000_000_000]
    monkeypatch.setattr(cupy_coll.recorder.time, "perf_counter_ns", lambda: now[0])
    return now


def recorder_of_rank_1() -> Recorder:
    recorder = Recorder(1, 4)
    recorder.members["2.data"] = (3, 1)
    recorder.set_zero("a job")
    return recorder


def begin(recorder: Recorder, number: int = 0, op: str = "barrier", *tensors: torch.Tensor) -> list[Any]:
    return recorder.begin("2.data", "PAIR [3, 1]", "collective", number, None, op, tensors)


def dumped(recorder: Recorder, directory: Path) -> dict[str, Any]:
    return json.loads(recorder.dump(directory, "asked for", {"2.data": {"collective": 5}}).read_text())


def test_it_keeps_the_last_thousand(tmp_path: Path) -> None:
    recorder = recorder_of_rank_1()
    for number in range(LENGTH + 7):
        recorder.end(begin(recorder, number))
    assert LENGTH == 1000
    operations = dumped(recorder, tmp_path)["operations"]
    assert [operation["number"] for operation in operations] == list(range(7, LENGTH + 7))
    assert [operation["sequence"] for operation in operations] == list(range(8, LENGTH + 8))


def test_the_file(clock: list[int], tmp_path: Path) -> None:
    """An operation that has ended, one that has not, and a message; times are microseconds since the start."""
    recorder = recorder_of_rank_1()
    clock[0] += 5_000
    first = begin(recorder, 0, "all_reduce", torch.ones(3, 5, dtype=torch.bfloat16), torch.ones(1))
    clock[0] += 2_500
    recorder.end(first)
    begin(recorder, 1, "barrier")
    recorder.begin("2.data", "PAIR [3, 1]", "send", 0, 3, "send", [torch.ones((), dtype=torch.int64)])
    clock[0] += 1_000
    path = recorder.dump(tmp_path / "made" / "for it", "asked for", {"2.data": {"collective": 2, "send": {3: 1}}})
    assert path == tmp_path / "made" / "for it" / "rank00001.json"
    assert [entry.name for entry in path.parent.iterdir()] == ["rank00001.json"], "nothing else is left there"
    content = json.loads(path.read_text())
    assert {key: content[key] for key in ("version", "job", "rank", "world_size", "reasons", "now")} == {
        "version": 1,
        "job": "a job",
        "rank": 1,
        "world_size": 4,
        "reasons": ["asked for"],
        "now": 8.5,
    }
    assert content["members"] == {"2.data": [3, 1]}
    assert content["started"] == {"2.data": {"collective": 2, "send": {"3": 1}}}
    assert content["program"].startswith("test_recorder.py:")
    assert abs(content["zero"] - time.time()) < 60
    common = {"channel": "2.data", "group": "PAIR [3, 1]"}
    assert content["operations"] == [
        common
        | {"sequence": 1, "kind": "collective", "number": 0, "peer": None, "op": "all_reduce"}
        | {"dtype": "bfloat16", "shape": [3, 5], "start": 5.0, "end": 7.5},
        common
        | {"sequence": 2, "kind": "collective", "number": 1, "peer": None, "op": "barrier"}
        | {"dtype": None, "shape": None, "start": 7.5, "end": None},
        common
        | {"sequence": 3, "kind": "send", "number": 0, "peer": 3, "op": "send"}
        | {"dtype": "int64", "shape": [], "start": 7.5, "end": None},
    ]


def test_every_reason_is_kept(tmp_path: Path) -> None:
    recorder = recorder_of_rank_1()
    for reason in ("timeout", "this rank ends the job"):
        path = recorder.dump(tmp_path, reason, {})
    assert json.loads(path.read_text())["reasons"] == ["timeout", "this rank ends the job"]


def test_a_new_start_forgets(clock: list[int], tmp_path: Path) -> None:
    recorder = recorder_of_rank_1()
    recorder.end(begin(recorder))
    clock[0] += 3_000
    recorder.set_zero("another job")
    content = dumped(recorder, tmp_path)
    assert (content["job"], content["operations"], content["now"]) == ("another job", [], 0.0)


def test_two_threads_write_at_once(tmp_path: Path) -> None:
    """As the watchdog and the program do when several ranks end the job; a reader finds a whole file at any time."""
    recorder = recorder_of_rank_1()
    for number in range(LENGTH):
        recorder.end(begin(recorder, number))
    errors: list[BaseException] = []
    recorder.dump(tmp_path, "first", {})

    def write() -> None:
        try:
            for _ in range(20):
                recorder.dump(tmp_path, "again", {})
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert len(json.loads((tmp_path / "rank00001.json").read_text())["operations"]) == LENGTH
    assert errors == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["rank00001.json"]


def test_the_last_operation_in_words(clock: list[int]) -> None:
    recorder = recorder_of_rank_1()
    here = r"the program is at test_recorder\.py:\d+ in test_the_last_operation_in_words"
    assert recorder.last().startswith("no operation yet; the program is at ")
    entry = begin(recorder, 4, "broadcast")
    clock[0] += 1_500_000_000
    assert recorder.last().startswith("last operation broadcast (group PAIR [3, 1], operation 4), in it for 1.5 s; ")
    recorder.end(entry)
    clock[0] += 300_000_000
    assert recorder.last().startswith("last operation broadcast (group PAIR [3, 1], operation 4), ended 0.3 s ago; ")
    for kind, direction in (("send", "to"), ("recv", "from")):
        recorder.begin("2.data", "PAIR [3, 1]", kind, 2, 3, kind, ())
        text = recorder.last()
        assert text.startswith(
            f"last operation {kind} (group PAIR [3, 1], operation 2, {direction} rank 3), in it for "
        )
        assert re.search(here, text)


def test_where_the_program_is() -> None:
    """The innermost frame outside the package, of the main thread, also when another thread asks."""
    answers = [where_the_program_is()]
    thread = threading.Thread(target=lambda: answers.append(where_the_program_is()))
    thread.start()
    thread.join()
    assert answers[0].startswith("test_recorder.py:")
    assert answers[0].endswith(" in test_where_the_program_is")
    assert answers[1].startswith("threading.py:")  # the main thread is in join()


def test_the_package_itself_is_left_out() -> None:
    """But not a folder of the caller's that begins with its name."""
    package = os.path.dirname(cupy_coll.recorder.__file__)
    places = []
    for file in (f"{package}/x.py", f"{package}_work/train.py"):
        namespace: dict[str, Any] = {}
        exec(compile("def call(f): return f()", file, "exec"), namespace)
        places.append(namespace["call"](where_the_program_is))
    assert places[0].startswith("test_recorder.py:")
    assert places[1] == "train.py:1 in call"


def test_a_walk_that_ends_early_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the main thread has returned from the frame at which another thread is looking."""

    class Left:
        """A frame of the package that the main thread has left: nothing stands behind it any more."""

        f_back = None

        class f_code:  # noqa: N801 - a frame's attribute
            co_filename = cupy_coll.recorder.__file__

    frames = [Left(), Left(), cupy_coll.recorder._main_frame()]
    monkeypatch.setattr(cupy_coll.recorder, "_main_frame", lambda: frames.pop(0))
    assert "test_recorder.py:" in where_the_program_is()
    monkeypatch.setattr(cupy_coll.recorder, "_main_frame", Left)
    assert where_the_program_is() == "an unknown place"
