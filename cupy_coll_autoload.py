"""What torch loads at its import (entry point ``torch.backends``): it registers the backend, and imports nothing.

A module of its own, so that importing torch does not import cupy_coll.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

# A process that an MPI launcher started has one of these: MPICH and Intel MPI, Open MPI, Slurm with PMIx.
LAUNCHED = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")


def register() -> None:
    """Make the backend "cupy_coll" and its rendezvous known to torch.distributed; once."""
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, "CUPY_COLL"):
        return

    dist.Backend.register_backend("cupy_coll", _create, extended_api=True, devices=["cpu", "cuda"])
    handlers: dict[str, Any] = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    by_environment = handlers["env"]

    def by_mpi(url: str, *arguments: Any, **options: Any) -> Iterator[Any]:
        from cupy_coll.torch_backend import rendezvous as meet

        return meet(url, *arguments, **options)

    def by_environment_or_mpi(url: str, *arguments: Any, **options: Any) -> Iterator[Any]:
        asked = "MASTER_ADDR" in os.environ or "rank=" in url
        launched = any(variable in os.environ for variable in LAUNCHED)
        ours = sys.modules.get("cupy_coll.context")
        begun = ours is not None and ours.CommContext().is_initialized()
        return (by_mpi if (launched or begun) and not asked else by_environment)(url, *arguments, **options)

    handlers["env"] = by_environment_or_mpi
    handlers["mpi"] = by_mpi


def _create(*arguments: Any) -> Any:
    from cupy_coll.torch_backend import create

    return create(*arguments)
