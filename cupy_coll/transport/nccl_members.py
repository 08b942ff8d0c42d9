"""What the members of a group tell each other before NCCL connects them, and what of it cannot work."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from cupy_coll.bootstrap import SHARED_GPU_VARIABLE, loaded_file
from cupy_coll.check import ranks_in_words

__all__ = ["Member", "installed_library", "problem_of", "trouble_of", "warn_of_paths"]

T = TypeVar("T")

logger = logging.getLogger("cupy_coll")

SHARED_GPU_VERSION = 23000  # the first that knows SHARED_GPU_VARIABLE


@dataclass(frozen=True)
class Member:
    """What a member says of itself.

    Attributes:
        host: its host's name.
        gpu: its GPU's UUID.
        version: its NCCL's, as ncclGetVersion gives it.
        library: the file that NCCL was loaded from; empty where that cannot be seen.
        shares_gpu: whether NCCL_MULTI_RANK_GPU_ENABLE=1 is set.
    """

    host: str
    gpu: str
    version: int
    library: str
    shares_gpu: bool


def problem_of(members: Sequence[Member], ranks: Sequence[int]) -> str:
    """Why these members cannot be connected, in words, the same on all of them; empty where they can."""
    return ". ".join(trouble_of(members, ranks) or ())


def trouble_of(members: Sequence[Member], ranks: Sequence[int]) -> tuple[str, str] | None:
    """Why these members cannot be connected, and what to do; None where they can."""
    versions = _ranks_by([member.version for member in members], ranks)
    if len(versions) > 1:
        sides = "; ".join(f"{in_words(version)} on {ranks_in_words(who)}" for version, who in versions.items())
        return (
            f"the ranks have different versions of NCCL, which do not work together: {sides}",
            "Start the same Python environment on all hosts",
        )
    for gpu, who in _ranks_by([member.gpu for member in members], ranks).items():
        if len(who) == 1:
            continue
        version = members[0].version
        if version >= SHARED_GPU_VERSION and all(member.shares_gpu for member in members):
            continue
        host = members[list(ranks).index(who[0])].host
        instead = (
            f"set {SHARED_GPU_VARIABLE}=1 on all ranks"
            if version >= SHARED_GPU_VERSION
            else f"take NCCL {in_words(SHARED_GPU_VERSION)} or later with {SHARED_GPU_VARIABLE}=1"
        )
        return (
            f"{ranks_in_words(who)} are on the same GPU ({gpu} of {host}), and NCCL {in_words(version)} wants one GPU "
            "a rank",
            "Choose the GPU before the first operation, such as torch.cuda.set_device("
            f"CommContext().get_in_node_rank() % torch.cuda.device_count()); to share one nevertheless, {instead}",
        )
    return None


def warn_of_paths(members: Sequence[Member], ranks: Sequence[int]) -> None:
    """Log that ranks have loaded NCCL from different files; that works where the version is the same."""
    paths = _ranks_by([member.library for member in members], ranks)
    if len(paths) > 1:
        sides = "; ".join(f"{path or 'unknown'} on {ranks_in_words(who)}" for path, who in paths.items())
        logger.warning("ranks have loaded NCCL from different files: %s", sides)


def in_words(version: int) -> str:
    """``2.28.3`` for 22803."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def installed_library() -> str:
    """The file that this process has loaded NCCL from; empty where that cannot be seen."""
    return loaded_file("libnccl")


def _ranks_by(values: Sequence[T], ranks: Sequence[int]) -> dict[T, list[int]]:
    found: dict[T, list[int]] = defaultdict(list)
    for value, rank in zip(values, ranks, strict=True):
        found[value].append(rank)
    return found
