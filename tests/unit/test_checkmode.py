"""What check mode says of calls that do not fit."""

from __future__ import annotations

from cupy_coll.checkmode import Call, differences


def test_the_larger_side_is_right():
    def call(text: str, **splits: tuple[int, ...]) -> Call:
        return Call(("1.data", 0), "G", (0, 1, 2), text, **splits)

    assert differences({0: call("a"), 1: call("a"), 2: call("a")}) == ""
    assert differences({0: call("a"), 1: call("b"), 2: call("b")}).splitlines() == [
        "rank 0 differs from ranks 1, 2",
        "    ranks 1, 2: b",
        "    rank 0: a",
    ]
    fits = {0: call("a", sends=(1, 2), receives=(1, 4)), 1: call("a", sends=(4, 0), receives=(2, 0))}
    assert differences(fits) == ""
    fits[1] = call("a", sends=(5, 0), receives=(2, 0))
    assert "rank 1: a, sends 5 elements to rank 0" in differences(fits)
