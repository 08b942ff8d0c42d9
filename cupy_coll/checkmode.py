"""Check mode: before each operation its members compare what they were called with.

Every member sends its call to every other member and waits for theirs, so operations of all groups run one after
another while it is on. The calls that one process sends to another are in the order of the program; where the next one
that comes is for another group than the one waited for, the two processes wait for each other for ever.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cupy_coll.check import ranks_in_words
from cupy_coll.dtypes import name_of
from cupy_coll.errors import MismatchError

if TYPE_CHECKING:
    from cupy_coll.lifecycle import Lifecycle

__all__ = ["Call", "CheckMode", "differences", "in_words"]

PATIENCE = 5.0  # seconds in which the member that decides has to answer one that gives up

Place = tuple[str, int]  # a channel's key and the number of the call on it


@dataclass(frozen=True)
class Call:
    """What a member called with.

    Attributes:
        place: where it belongs.
        group: the group's name.
        ranks: the group's members.
        text: what all members must agree on, in words.
        sends, receives: elements for and from each member, where those may differ between members.
    """

    place: Place
    group: str
    ranks: tuple[int, ...]
    text: str
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()


def in_words(name: str, tensor: torch.Tensor | None, reduction: str = "", root: int | None = None) -> str:
    """``all_reduce [4, 3] float32, SUM``."""
    parts = [name if tensor is None else f"{name} {list(tensor.shape)} {name_of(tensor.dtype)}"]
    if reduction:
        parts.append(reduction)
    if root is not None:
        parts.append(f"root rank {root}")
    return ", ".join(parts)


def differences(calls: dict[int, Call]) -> str:
    """What is wrong with the members' calls at one place, in words; empty where nothing is."""
    texts: dict[str, list[int]] = defaultdict(list)
    for rank, call in calls.items():
        texts[call.text].append(rank)
    if len(texts) > 1:
        return _sides([(ranks, text) for text, ranks in texts.items()])
    members = list(calls)
    pairs = [
        (source, target)
        for i, source in enumerate(members)
        for j, target in enumerate(members)
        if calls[source].sends and calls[source].sends[j] != calls[target].receives[i]
    ]
    if not pairs:
        return ""
    source, target = pairs[0]
    sent, expected = calls[source].sends[members.index(target)], calls[target].receives[members.index(source)]
    return (
        f"{_who_differs(pairs)}"
        f"\n    rank {source}: {calls[source].text}, sends {sent} elements to rank {target}"
        f"\n    rank {target}: {calls[target].text}, expects {expected} elements from rank {source}"
    )


def _who_differs(pairs: list[tuple[int, int]]) -> str:
    """The rank that is in every pair of ranks that do not fit, where there is one."""
    common = set.intersection(*(set(pair) for pair in pairs))
    others = sorted({rank for pair in pairs for rank in pair} - common)
    if len(common) == 1:
        return f"rank {common.pop()} differs from {ranks_in_words(others)}"
    return f"{ranks_in_words(sorted({*common, *others}))} differ"


def _sides(sides: list[tuple[list[int], str]]) -> str:
    """Name the odd ranks (all but the largest side) and show every side in a line."""
    sides = sorted(sides, key=lambda side: (-len(side[0]), side[0]))
    odd = sorted(rank for ranks, _ in sides[1:] for rank in ranks)
    lines = "".join(f"\n    {ranks_in_words(ranks)}: {text}" for ranks, text in sides)
    return f"{ranks_in_words(odd)} differ{'s' * (len(odd) == 1)} from {ranks_in_words(sides[0][0])}{lines}"


class CheckMode:
    """The comparison of calls in one world.

    Args:
        lifecycle: carries the messages and waits.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._numbers: dict[str, int] = defaultdict(int)  # the next call of each channel
        self._inbox: dict[int, deque[Call]] = defaultdict(deque)  # what each rank has sent, in order
        self._verdicts: list[tuple[str, list[Place]]] = []  # errors found elsewhere, and the places that they void
        self._voided: set[Place] = set()
        self._accepted: set[Place] = set()  # what the decider lets pass
        self._closed: set[Place] = set()  # where the time is over, at the decider
        self._timed_out: set[Place] = set()  # what was given up for want of a member
        lifecycle.mailbox.handlers |= {
            "call": self._take_call,
            "accepted": lambda source, place: self._accepted.add(place),
            "give up": self._take_giving_up,
            "verdict": self._take_verdict,
        }

    def compare(
        self, key: str, group: str, ranks: tuple[int, ...], text: str, sends: Sequence[int], receives: Sequence[int]
    ) -> None:
        """Return when every member has come here with a call that fits.

        Raises:
            MismatchError: on every member, where one called with something else, in another group, or not at all
                within the timeout. Nothing has been sent then, and the next operation works.
            PeerError: a member has left.
        """
        place = (key, self._numbers[key])
        call = Call(place, group, ranks, text, tuple(sends), tuple(receives))
        entry = self._lifecycle.recorder.begin(key, group, "check", place[1], None, f"check {text}", ())
        try:
            self._exchange(call)
        finally:
            if place in self._timed_out:  # the entry stays open: the trace shows who has not come
                self._lifecycle.dump_if_wanted("timeout")
            else:
                self._lifecycle.recorder.end(entry)

    def made(self, key: str) -> int:
        """How many calls on a channel are past their check."""
        return self._numbers[key]

    def _exchange(self, call: Call) -> None:
        """Send the call, wait for everybody's and compare them.

        Every member sees by itself that calls do not fit. That they do fit, in time, one member decides, the first of
        the group: or a late one could be accepted by some and given up by others.
        """
        place, ranks = call.place, call.ranks
        own, decider = self._lifecycle.mailbox.rank, call.ranks[0]
        others = [rank for rank in ranks if rank != own]
        with self._lifecycle.lock:
            self._lifecycle.mailbox.post("call", call, others)

        def verdict() -> str:
            return next((text for text, places in self._verdicts if place in places), "")

        def elsewhere() -> list[int]:
            return [rank for rank in others if self._inbox[rank] and self._inbox[rank][0].place != place]

        def absent() -> list[int]:
            return [rank for rank in others if not self._inbox[rank]]

        def calls() -> dict[int, Call]:
            return {rank: call if rank == own else self._inbox[rank][0] for rank in ranks}

        def settled() -> bool:
            if verdict() or elsewhere():
                return True
            return not absent() and (own == decider or place in self._accepted or bool(differences(calls())))

        def wait(limit: float) -> bool:
            return self._lifecycle.wait_until(
                settled,
                lambda departed: [rank for rank in absent() or [decider] if rank in departed],
                lambda: f"{call.text} (group {call.group}, call {place[1]})",
                limit,
            )

        if not wait(self._lifecycle.timeout):
            missing = absent() or [decider]
            if own == decider:
                self._closed.add(place)
                self._publish(self._missing(call, missing), [call], timed_out=True)
            else:
                content = (self._missing(call, missing), call)
                with self._lifecycle.lock:
                    self._lifecycle.mailbox.post("give up", content, [decider])
                if not wait(PATIENCE):  # the decider does not answer
                    self._publish(self._missing(call, missing), [call], timed_out=True)
        with self._lifecycle.lock:
            if elsewhere() and not verdict():
                theirs = self._inbox[elsewhere()[0]][0]
                self._publish(self._crossing(call, theirs), [call, theirs])
            if verdict():
                self._raise(verdict(), place)
            wrong = differences(calls())
            if own == decider and not wrong:
                self._lifecycle.mailbox.post("accepted", place, others)
            for rank in others:
                self._inbox[rank].popleft()
            self._accepted.discard(place)
            self._numbers[place[0]] += 1
        if wrong:
            raise MismatchError(f"{call.text} (group {call.group}, call {place[1]}): {wrong}")

    def _missing(self, call: Call, absent: list[int]) -> str:
        states = self._lifecycle.states_in_words(absent, self._lifecycle.states(absent))
        return (
            f"{call.text} (group {call.group}, call {call.place[1]}): {ranks_in_words(absent)} did not call it within "
            f"{self._lifecycle.timeout:g} s{states}"
        )

    def _crossing(self, call: Call, theirs: Call) -> str:
        sides = []
        for one in (call, theirs):
            ranks = [rank for rank, calls in self._inbox.items() if calls and calls[0].place == one.place]
            own = [self._lifecycle.mailbox.rank] if one is call else []
            sides.append((sorted(ranks + own), f"{one.text}, in group {one.group}"))
        return f"{call.text} (group {call.group}, call {call.place[1]}): {_sides(sides)}"

    def _publish(self, text: str, calls: Sequence[Call], timed_out: bool = False) -> None:
        """Tell every member of the calls' groups that they end in the error ``text``."""
        content = (text, [call.place for call in calls], timed_out)
        with self._lifecycle.lock:
            self._lifecycle.mailbox.post("verdict", content, sorted({rank for call in calls for rank in call.ranks}))
            self._take_verdict(self._lifecycle.mailbox.rank, content)

    def _raise(self, text: str, place: Place) -> None:
        """Raise ``text``; this rank, like every other one that hears of it, is past the voided places then."""
        voided = {place, *(other for _, places in self._verdicts if place in places for other in places)}
        for key, number in voided:
            self._numbers[key] = max(self._numbers[key], number + 1)
        self._verdicts = [(said, places) for said, places in self._verdicts if not self._is_over(places)]
        raise MismatchError(text)

    def _is_over(self, places: Sequence[Place]) -> bool:
        return any(self._numbers[key] > number for key, number in places)

    # ------------------------------------------------------------------ what comes

    def _take_call(self, source: int, call: Call) -> None:
        if call.place not in self._voided:
            self._inbox[source].append(call)

    def _take_giving_up(self, source: int, content: tuple[str, Call]) -> None:
        """A member's time is over: so is everybody's, unless the call has been accepted."""
        text, call = content
        if not self._is_over([call.place]) and call.place not in self._closed | self._voided:
            self._publish(text, [call], timed_out=True)

    def _take_verdict(self, source: int, content: Any) -> None:
        text, places, timed_out = content
        self._voided.update(places)
        if timed_out:
            self._timed_out.update(places)
        for rank, calls in self._inbox.items():
            self._inbox[rank] = deque(call for call in calls if call.place not in self._voided)
        if not self._is_over(places):
            self._verdicts.append((text, places))
