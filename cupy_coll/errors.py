"""The exceptions that cupy_coll raises.

A caller's mistake is an :class:`ArgumentError`; a disagreement between ranks, a lost member, an expired timeout and
a failure of the library underneath each have a class of their own, so that a program can tell them apart.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "CommTimeoutError",
    "CupyCollError",
    "DTypeError",
    "GroupError",
    "MismatchError",
    "NotInitializedError",
    "PeerError",
    "ShapeError",
    "TransportError",
]


class CupyCollError(Exception):
    """Base of all errors of this package."""


class ArgumentError(CupyCollError, ValueError):
    """An argument is wrong; the message names the function, the argument, what was expected and what came."""


class ShapeError(ArgumentError):
    """A tensor's shape or memory layout does not fit the operation."""


class DTypeError(ArgumentError):
    """A dtype, or a dtype together with a reduction, is not supported."""


class GroupError(ArgumentError):
    """A group, mode or root rank does not fit."""


class NotInitializedError(CupyCollError, RuntimeError, KeyError):
    """The context, or the mode that was asked for, has not been initialised."""

    __str__ = Exception.__str__  # KeyError's own shows the message's repr


class MismatchError(CupyCollError):
    """The members of a group called with arguments that do not belong together."""


class CommTimeoutError(CupyCollError, TimeoutError):
    """An operation did not end within its timeout."""


class PeerError(CupyCollError):
    """A member of the group left, or failed, while this rank waited for it.

    Attributes:
        ranks: the global ranks of the members that are gone.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class TransportError(CupyCollError):
    """MPI or NCCL reported a failure of its own.

    Attributes:
        code: the library's error code, or None where it has none.
        text: the library's own description.
    """

    def __init__(self, message: str, code: int | None = None, text: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.text = text
