"""Modes, and the context that knows which group of ranks each of them is."""

from __future__ import annotations

import logging
import operator
import os
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import torch.distributed
import torch.distributed.device_mesh

from cupy_coll import bootstrap, topology
from cupy_coll import check as checks
from cupy_coll.checkmode import CheckMode
from cupy_coll.errors import (
    ArgumentError,
    CommTimeoutError,
    CupyCollError,
    GroupError,
    NotInitializedError,
    TransportError,
)
from cupy_coll.group import Group
from cupy_coll.lifecycle import TRACE_VARIABLE, Lifecycle, install_exit_hooks, seconds
from cupy_coll.transport.base import Channel, Steps
from cupy_coll.transport.objects import all_gather_objects

__all__ = [
    "CommContext",
    "CommMode",
    "ParallelMode",
    "initialize_distributed_env",
    "resolve_group",
    "resolve_tensor_parallel",
]

logger = logging.getLogger("cupy_coll")

BACKENDS = ("nccl", "auto", "mpi", "gloo")
HOST_BACKENDS = ("mpi", "gloo")
DEFAULT_TIMEOUT = 1800
CLOCK_BARRIERS = 3  # the first ones bring the ranks together, the last one aligns their clocks
LATE = 30  # seconds that a rank waits for others to start, at least; after a third of it, it says so


class CommMode:
    """Names of the groups that every job has. Any other string can name a group of the user's."""

    GLOBAL = "GLOBAL"
    INTRA_NODE = "INTRA_NODE"
    INTER_NODE = "INTER_NODE"


class ParallelMode(CommMode):
    """Names of the groups of parallel training."""

    TRAIN_DATA_PARALLEL = "TRAIN_DATA_PARALLEL"
    DATA_PARALLEL = "DATA_PARALLEL"
    TENSOR_PARALLEL = "TENSOR_PARALLEL"
    SEQUENCE_PARALLEL = "SEQUENCE_PARALLEL"
    CONTEXT_PARALLEL = "CONTEXT_PARALLEL"
    PIPELINE_PARALLEL = "PIPELINE_PARALLEL"
    WEIGHT_TRANSFER = "WEIGHT_TRANSFER"


# The axes of a mesh and the modes that their groups are registered under.
MESH_MODES = {
    "dp": (ParallelMode.DATA_PARALLEL, ParallelMode.TRAIN_DATA_PARALLEL),
    "pp": (ParallelMode.PIPELINE_PARALLEL,),
    "cp": (ParallelMode.CONTEXT_PARALLEL,),
    "sp": (ParallelMode.SEQUENCE_PARALLEL,),
    "tp": (ParallelMode.TENSOR_PARALLEL,),
}


class CommContext:
    """The process' place in the job: its rank, its node and its groups. A singleton.

    ``with CommContext() as context:`` destroys it at the end of a block that raises nothing.
    """

    _instance: ClassVar[CommContext | None] = None
    _lifecycle: Lifecycle | None
    _groups: dict[str, Group | None]
    _world: Group
    _nodes: list[int]
    _serial: int
    _made: list[Group]
    _spare: list[Group]
    _among: dict[tuple[int, ...], int]

    def __new__(cls) -> CommContext:
        if cls._instance is None:
            instance = super().__new__(cls)
            instance._forget()
            cls._instance = instance
        return cls._instance

    def _forget(self) -> None:
        self._lifecycle = None
        self._groups = {}
        self._nodes = []
        self._serial = 0
        self._made = []
        self._spare = []
        self._among = {}

    def __enter__(self) -> CommContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # else the error ends the job; waiting for the others here would hide it
            self.destroy()

    # ------------------------------------------------------------------ beginning and end

    def is_initialized(self) -> bool:
        """Whether :meth:`init_distributed_env` has been called, and :meth:`destroy` not since."""
        return self._lifecycle is not None

    def init_distributed_env(
        self,
        world_size: int | None = None,
        rank: int | None = None,
        backend: str = "nccl",
        dist_url: str = "env://",
        timeout: float | timedelta = DEFAULT_TIMEOUT,
        *,
        comm: Any = None,
        check: bool | None = None,
    ) -> None:
        """Join the job: make the groups GLOBAL, INTRA_NODE and INTER_NODE. Called by every rank.

        Args:
            world_size, rank: may be left out; MPI knows them, and others are an error.
            backend: "nccl" or "auto": the device of a tensor decides; "mpi" or "gloo": CPU tensors only.
            dist_url: accepted and not used.
            timeout: seconds (or a timedelta) that a rank waits for others; where it is left out, the environment
                variable CUPY_COLL_TIMEOUT may give it.
            comm: an mpi4py communicator that is the world, instead of COMM_WORLD.
            check: check mode: before each operation its members compare what they were called with, and all raise
                MismatchError where it does not fit. Operations of all groups then run one after another. Where it is
                left out, the environment variable CUPY_COLL_CHECK=1 turns it on.

        Raises:
            ArgumentError: on every rank, where an argument is wrong on one.
            MismatchError: on every rank, where the backends or timeouts of the ranks differ.
            GroupError: the context is initialised already.
            TransportError: MPI cannot be used.
            CommTimeoutError: not every rank has come.
        """
        function = "init_distributed_env"
        if self._lifecycle is not None:
            raise GroupError(f"{function}: the context is initialised already; destroy() it first")
        MPI = bootstrap.mpi()
        base = MPI.COMM_WORLD if comm is None else comm
        if not isinstance(base, MPI.Intracomm) or base == MPI.COMM_NULL:
            raise ArgumentError(f"{function}: comm must be an mpi4py intra-communicator, got {base!r}")
        error: CupyCollError | None = None
        limit = float(DEFAULT_TIMEOUT)
        checked = check
        try:
            limit = _timeout(function, timeout)
            checked = _check_mode_wanted(function, check)
            _check_backend(function, backend)
            _check_world(function, base, world_size, rank)
        except CupyCollError as problem:
            error = problem
        install_exit_hooks(base)
        lifecycle = Lifecycle(_duplicate_when_all_have_come(base, limit), limit)
        host_only = backend in HOST_BACKENDS
        everybody = tuple(range(base.size))
        world = Group(_communicators(lambda: _duplicate(base)), lifecycle, everybody, CommMode.GLOBAL, 0, host_only)
        try:
            sent = (backend, limit, checked), uuid.uuid4().hex
            received = all_gather_objects(world.objects, function, "arguments", sent, error)
            checks.same_on_all(function, "(backend, timeout, check)", world.ranks, [options for options, _ in received])
        except CupyCollError:
            world.release(free=True)
            lifecycle.dismiss()
            raise
        for _ in range(CLOCK_BARRIERS):
            world.control.run(function, _barrier(world.control))
        lifecycle.recorder.set_zero(received[0][1])
        if checked:
            lifecycle.check = CheckMode(lifecycle)
        self._lifecycle, self._world = lifecycle, world
        self._made, self._serial = [world], 1
        self._groups = {CommMode.GLOBAL: world}
        self._nodes = bootstrap.node_of_each_rank(base)
        warning = bootstrap.local_rank_warning(self.get_in_node_rank()) if comm is None else None
        if warning:
            logger.warning(warning)
        for mode, groups in (
            (CommMode.INTRA_NODE, topology.intra_node_groups(self._nodes)),
            (CommMode.INTER_NODE, topology.inter_node_groups(self._nodes)),
        ):
            self._register((mode,), self._make(function, groups, mode, host_only))

    def destroy(self) -> None:
        """Leave the job: finish what is in flight, wait for the others, free all communicators. Called by every rank.

        Afterwards :meth:`init_distributed_env` may be called again. Nothing happens where the context is not
        initialised.
        """
        lifecycle = self._lifecycle
        if lifecycle is None:
            return
        together = lifecycle.leave_together()
        for group in self._made:
            group.release(free=together)
        if together:
            lifecycle.mailbox.free()
        self._forget()

    def dump_trace(self, directory: str | os.PathLike[str] | None = None) -> Path:
        """Write this rank's last 1,000 operations to ``directory/rank<RANK>.json``; ``python -m cupy_coll trace`` reads
        the files of all ranks.

        Args:
            directory: made where it does not exist; None: the environment variable CUPY_COLL_TRACE_DIR.

        Returns:
            The file's path.
        """
        function = "dump_trace"
        self._require(function)
        assert self._lifecycle is not None
        directory = directory or os.environ.get(TRACE_VARIABLE)
        if not directory:
            raise ArgumentError(f"{function}: no directory is given, and {TRACE_VARIABLE} is not set")
        return self._lifecycle.dump(directory, "on request")

    # ------------------------------------------------------------------ groups

    def init_group(
        self, ranks: Sequence[int], mode: str | None = None, backend: str = "nccl", use_cpu: bool = False
    ) -> Group | None:
        """Make the group of ``ranks`` and register it under ``mode``.

        Called by every rank of the world, also those outside, for every list, in the same order.

        Args:
            ranks: global ranks; their order is the order in the group.
            mode: a name of CommMode or ParallelMode, or any other string.
            backend, use_cpu: "mpi" or "gloo", or True: CPU tensors only.

        Returns:
            The group; None on a rank outside. A rank outside keeps the registration that it has for ``mode``.

        Raises:
            ArgumentError, GroupError: on every rank, where the arguments are wrong on one.
            MismatchError: on every rank, where the ranks called with different arguments.
            TransportError: on every rank; MPI has no more communicators.
        """
        function = "init_group"
        error: CupyCollError | None = None
        arguments: Any = None
        self._require(function)
        try:
            _check_mode(function, mode)
            _check_backend(function, backend)
            arguments = (_rank_list(function, ranks, self._world.size), mode, backend, bool(use_cpu))
        except CupyCollError as problem:
            error = problem
        calls = all_gather_objects(self._world.objects, function, "arguments", arguments, error)
        checks.same_on_all(function, "(ranks, mode, backend, use_cpu)", self._world.ranks, calls)
        members, name = arguments[0], str(mode)
        group = self._make(function, [members], name, use_cpu or backend in HOST_BACKENDS)
        self._register((name,), group)
        return group

    def init_mesh(self, **axes: int) -> dict[str, Group]:
        """Make the groups along each axis of a mesh of all ranks; the last name varies fastest.

        ``init_mesh(dp=2, tp=2)`` on 4 ranks makes the dp groups [0, 2], [1, 3] and the tp groups [0, 1], [2, 3].
        Called by every rank of the world.

        Args:
            axes: sizes whose product is the world size. dp registers DATA_PARALLEL and TRAIN_DATA_PARALLEL; pp, cp,
                sp, tp register their own mode; another name registers itself.

        Returns:
            This rank's group along each axis.

        Raises:
            ArgumentError: on every rank, where the sizes do not fit on one.
            MismatchError: on every rank, where the ranks called with different axes.
        """
        function = "init_mesh"
        self._require(function)
        error: CupyCollError | None = None
        lists: dict[str, list[list[int]]] = {}
        try:
            lists = topology.mesh_groups(self._world.size, **axes)
        except ArgumentError as problem:
            error = type(problem)(str(problem).replace("mesh_groups", function, 1))
        calls = all_gather_objects(self._world.objects, function, "axes", list(axes.items()), error)
        checks.same_on_all(function, "axes", self._world.ranks, calls)
        mesh: dict[str, Group] = {}
        for axis, groups in lists.items():
            modes = MESH_MODES.get(axis, (axis,))
            group = self._make(function, groups, modes[0], self._world.host_only)
            assert group is not None, "every rank is in one group of each axis"
            self._register(modes, group)
            mesh[axis] = group
        return mesh

    def _make(self, function: str, lists: Sequence[Sequence[int]], name: str, host_only: bool) -> Group | None:
        """Make the groups of disjoint lists of ranks, all at once; return this rank's own. Called by every rank."""
        assert self._lifecycle is not None
        serial, self._serial = self._serial, self._serial + 1
        part, own = next(((i, tuple(ranks)) for i, ranks in enumerate(lists) if self._world.rank in ranks), (-1, None))
        group, error = None, None
        if own is not None:
            try:
                group = Group(self._split(own), self._lifecycle, own, name, serial, host_only)
            except TransportError as problem:
                error = problem
        try:
            ready = all_gather_objects(self._world.control, function, "state", self._world.can_split(), error)
            if all(ready) and not host_only:
                self._world.split(function, group, part)
        except CupyCollError:
            if group is not None:
                group.release(free=True)
            raise
        if group is not None:
            self._made.append(group)
        return group

    def group_among(self, ranks: Sequence[int], name: str = "PROCESS_GROUP", *, new: bool = False) -> Group:
        """The latest group of these ranks in this order; made by them where there is none. Called by its members only.

        Args:
            new: one that nobody else uses: it is made, or was given back (:meth:`give_back`).

        Raises:
            NotInitializedError: the context has not been initialised.
            TransportError: MPI has no more communicators.
            PeerError: a member has left. Where one does not come within the timeout, the job ends with a report.
        """
        self._require("group_among")
        assert self._lifecycle is not None
        own = tuple(ranks)
        self._made = [group for group in self._made if not group.closed]
        for group in self._made if new else reversed(self._made):
            if group.ranks == own and (group in self._spare) == new:
                if new:
                    self._spare.remove(group)
                return group
        # The world's serial numbers are for what all its ranks make; members count by themselves.
        self._among[own] = self._among.get(own, 0) + 1
        serial = f"{'.'.join(map(str, own))}:{self._among[own]}"
        self._lifecycle.meet(f"making the group {name} {list(own)}", serial, own)
        group = Group(self._split(own, tag=1), self._lifecycle, own, name, serial, self._world.host_only)
        self._made.append(group)
        return group

    def give_back(self, group: Group) -> None:
        """Keep a group for the next :meth:`group_among` of its ranks; its members do so, and none waits for another."""
        if group in self._made:
            self._spare.append(group)

    def _split(self, ranks: tuple[int, ...], tag: int = 0) -> list[Any]:
        parent = self._world.control.comm
        everybody = parent.Get_group()
        members = everybody.Incl(ranks)
        try:
            return _communicators(lambda: parent.Create_group(members, tag=tag))
        finally:
            members.Free()
            everybody.Free()

    def _register(self, modes: Iterable[str], group: Group | None) -> None:
        for mode in modes:
            if group is not None or mode not in self._groups:
                self._groups[mode] = group

    # ------------------------------------------------------------------ questions

    def get_group(self, comm_mode: str) -> Group | None:
        """The group of a mode that this rank is in; None where it is outside.

        Raises:
            NotInitializedError: the context or the mode has not been initialised.
        """
        return self._lookup("get_group", comm_mode)

    def get_world_size(self, comm_mode: str = CommMode.GLOBAL) -> int:
        """The number of ranks in the group of a mode.

        Raises:
            NotInitializedError: the context or the mode has not been initialised.
            GroupError: this rank is outside.
        """
        return self._member("get_world_size", comm_mode).size

    def get_global_rank(self) -> int:
        """This process' rank in the world."""
        self._require("get_global_rank")
        return self._world.rank

    def get_local_rank(self, comm_mode: str) -> int:
        """This process' index in the group of a mode.

        Raises:
            NotInitializedError: the context or the mode has not been initialised.
            GroupError: this rank is outside.
        """
        return self._member("get_local_rank", comm_mode).rank

    def get_in_node_rank(self) -> int:
        """This process' index among those of its node, by MPI's shared-memory split."""
        self._require("get_in_node_rank")
        rank = self._world.rank
        return sum(node == self._nodes[rank] for node in self._nodes[:rank])

    def get_local_world_size(self) -> int:
        """The number of ranks on this node."""
        self._require("get_local_world_size")
        return self._nodes.count(self._nodes[self._world.rank])

    def get_ranks_in_group(self, comm_mode: str) -> list[int]:
        """The global ranks in the group of a mode, in the group's order.

        Raises:
            NotInitializedError: the context or the mode has not been initialised.
            GroupError: this rank is outside.
        """
        return list(self._member("get_ranks_in_group", comm_mode).ranks)

    def get_intra_node_process_group(self) -> Group:
        """The group of the ranks on this node."""
        return self._member("get_intra_node_process_group", CommMode.INTRA_NODE)

    def get_inter_node_process_group(self) -> Group:
        """The group of the ranks that have this one's in-node rank on the nodes."""
        return self._member("get_inter_node_process_group", CommMode.INTER_NODE)

    def is_main_rank(self) -> bool:
        """Whether this is global rank 0."""
        self._require("is_main_rank")
        return self._world.rank == 0

    def _require(self, function: str) -> None:
        if self._lifecycle is None:
            raise NotInitializedError(
                f"{function}: the context is not initialised; call CommContext().init_distributed_env() on every rank"
            )

    def _lookup(self, function: str, mode: str) -> Group | None:
        self._require(function)
        _check_mode(function, mode)
        if mode not in self._groups:
            raise NotInitializedError(
                f"{function}: mode {mode!r} is not initialised; call CommContext().init_group(ranks, {mode!r}) or "
                f"init_mesh(...) on every rank (initialised: {', '.join(self._groups)})"
            )
        return self._groups[mode]

    def _member(self, function: str, mode: str) -> Group:
        group = self._lookup(function, mode)
        if group is None:
            raise GroupError(f"{function}: rank {self._world.rank} is not in the group of mode {mode!r}")
        return group


def initialize_distributed_env(
    rank: int,
    world_size: int,
    backend: str = "nccl",
    dist_url: str = "env://",
    timeout: float | timedelta = DEFAULT_TIMEOUT,
) -> None:
    """``CommContext().init_distributed_env`` with the rank first."""
    CommContext().init_distributed_env(world_size, rank, backend, dist_url, timeout)


def resolve_group(group: Any, function: str) -> Group | None:
    """The group that a ``comm_mode``, ``group`` or ``tp_group`` argument means.

    Args:
        group: a Group, a mode, a torch.distributed.ProcessGroup, a DeviceMesh of one dimension, or None: the global
            group.
        function: the caller's name, for messages.

    Returns:
        None on a rank outside.

    Raises:
        NotInitializedError: the context or the mode has not been initialised.
        GroupError: it is none of these, or closed.
    """
    context = CommContext()
    if group is None or isinstance(group, str):
        found = context._lookup(function, CommMode.GLOBAL if group is None else group)
    elif isinstance(group, Group):
        found = group
    elif group is torch.distributed.GroupMember.NON_GROUP_MEMBER:  # what new_group() gives on a rank outside
        found = None
    else:
        found = _of_process_group(context, function, group)
    if found is not None:
        checks.open_group(function, found)
    return found


def resolve_tensor_parallel(group: Any, function: str) -> Group | None:
    """``resolve_group`` for the group that a vocabulary is split over.

    Raises:
        GroupError: also for None on a rank outside TENSOR_PARALLEL. There None is what ``init_group`` and ``get_group``
            gave, and taken for the global group this rank would wait for others that are in theirs.
    """
    mode = ParallelMode.TENSOR_PARALLEL
    groups = CommContext()._groups
    if group is None and mode in groups and groups[mode] is None:
        raise GroupError(
            f"{function}: the group is None, which means the global group, on a rank outside {mode}. Pass the mode "
            f"{mode!r}, which gives None there, or CommMode.GLOBAL where all ranks take part"
        )
    return resolve_group(group, function)


def _of_process_group(context: CommContext, function: str, group: Any) -> Group | None:
    """The group of a torch ProcessGroup or of a DeviceMesh of one dimension.

    One of this package's backend has it; another one's is matched by its ranks, which make it where there is none.
    """
    if isinstance(group, torch.distributed.device_mesh.DeviceMesh):
        if group.ndim != 1:
            raise GroupError(
                f"{function}: the DeviceMesh has dimensions {group.mesh_dim_names or group.ndim}, expected one, such "
                "as mesh['tp']"
            )
        group = group.get_group()
    if not isinstance(group, torch.distributed.ProcessGroup):
        raise GroupError(
            f"{function}: expected a mode, a Group, a torch.distributed.ProcessGroup or a DeviceMesh of one dimension, "
            f"got {type(group).__name__}"
        )
    own: Group | None = getattr(group, "cupy_coll_group", None)
    if own is not None:
        return own
    context._require(function)
    ranks = torch.distributed.get_process_group_ranks(group)
    return context.group_among(ranks) if context.get_global_rank() in ranks else None


# ---------------------------------------------------------------------- arguments


def _timeout(function: str, timeout: float | timedelta) -> float:
    variable = os.environ.get("CUPY_COLL_TIMEOUT")
    if timeout != DEFAULT_TIMEOUT or not variable:
        return seconds(function, timeout)
    try:
        return seconds(function, float(variable))
    except ValueError as error:
        raise ArgumentError(
            f"{function}: CUPY_COLL_TIMEOUT must be a positive number of seconds, got {variable!r}"
        ) from error


def _check_mode_wanted(function: str, check: bool | None) -> bool:
    if check is not None:
        return bool(check)
    variable = os.environ.get("CUPY_COLL_CHECK", "")
    if variable not in ("", "0", "1"):
        raise ArgumentError(f"{function}: CUPY_COLL_CHECK must be 0 or 1, got {variable!r}")
    return variable == "1"


def _check_backend(function: str, backend: str) -> None:
    if backend not in BACKENDS:
        raise ArgumentError(f"{function}: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")


def _check_mode(function: str, mode: Any) -> None:
    if not isinstance(mode, str) or not mode:
        raise GroupError(f"{function}: mode must be a name such as CommMode.GLOBAL or 'TENSOR_PARALLEL', got {mode!r}")


def _check_world(function: str, comm: Any, world_size: int | None, rank: int | None) -> None:
    for name, given, actual in (("world_size", world_size, comm.size), ("rank", rank, comm.rank)):
        if given is not None and given != actual:
            raise ArgumentError(
                f"{function}: {name} is {given!r}, but MPI says {actual}; leave it out, or start the job with mpiexec"
            )


def _rank_list(function: str, ranks: Any, world_size: int) -> list[int]:
    try:
        members = [operator.index(rank) for rank in ranks]
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{function}: ranks must be a list of global ranks, got {ranks!r}") from error
    wrong = [rank for rank in members if not 0 <= rank < world_size]
    if not members or wrong or len(set(members)) != len(members):
        raise GroupError(
            f"{function}: ranks must be different ranks from 0 to {world_size - 1}, at least one, got {members}"
        )
    return members


# ---------------------------------------------------------------------- communicators


def _communicators(make: Callable[[], Any]) -> list[Any]:
    """The three communicators of a group: a new one and two duplicates of it."""
    MPI = bootstrap.mpi()
    made: list[Any] = []
    try:
        made.append(make())
        made += [_duplicate(made[0])]
        made += [_duplicate(made[0])]
    except MPI.Exception as error:
        for comm in made:
            comm.Free()
        text = error.Get_error_string()
        raise TransportError(
            f"MPI cannot make another communicator: {text}. A Group takes three, and MPICH has 2,046 in all: reuse "
            "groups, or close() those that are no longer needed",
            error.Get_error_code(),
            text,
        ) from error
    return made


def _duplicate(comm: Any) -> Any:
    """A duplicate of a communicator. Where ranks share cores, MPI's own waiting takes them from those it waits for."""
    duplicate, request = comm.Idup()
    polls = 0
    while not request.Test():
        polls += 1
        if polls < 100:
            os.sched_yield()
        else:  # making a group is rare: the cores are for those who are late
            time.sleep(100e-6)
    return duplicate


def _barrier(channel: Channel) -> Steps:
    yield [channel.comm.Ibarrier()]


def _duplicate_when_all_have_come(comm: Any, limit: float) -> Any:
    """A duplicate of the world's communicator, waiting for the other ranks as long as ``limit``.

    But at least LATE: ranks that import at the same time on few cores start seconds apart.
    """
    limit = max(limit, LATE)
    duplicate, request = comm.Idup()
    begin, said = time.monotonic(), False
    while not request.Test():
        waited = time.monotonic() - begin
        if waited > limit:
            raise CommTimeoutError(
                f"init_distributed_env: rank {comm.rank} has waited {limit:g} s for the other {comm.size - 1} ranks"
            )
        if waited > LATE / 3 and not said:
            said = True
            logger.warning(
                "init_distributed_env: rank %d has waited %.0f s for the others to call it", comm.rank, waited
            )
        time.sleep(100e-6)
    return duplicate
