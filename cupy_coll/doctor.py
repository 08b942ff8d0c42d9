"""``python -m cupy_coll doctor``: what a job has where it is started, and whether it works.

What cannot be had is a fact of the report, not an exception, and every step has a time limit: also MPI's start, which
can block with the interpreter's lock held, so that a child process looks after it.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import select
import signal
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

import torch
from torch.distributed import ReduceOp

from cupy_coll import bootstrap
from cupy_coll.context import CommContext, CommMode
from cupy_coll.device import Device, devices
from cupy_coll.diagnosis import (
    Facts,
    Finding,
    Gpu,
    Outcome,
    as_json,
    before_mpi,
    can_try_nccl,
    findings,
    launcher_of,
    library_in_words,
    report,
    shm_in_words,
)
from cupy_coll.errors import CupyCollError, TransportError
from cupy_coll.group import Group
from cupy_coll.transport import nccl
from cupy_coll.transport.nccl_members import installed_library
from cupy_coll.transport.objects import all_gather_objects

__all__ = ["TIMEOUT", "run"]

TIMEOUT = 30.0  # seconds for each step; CommContext waits as long for ranks that start late
SLACK = 15.0  # seconds that the child process grants on top, for a step ends by itself where it can
REPEATS = 5


def run(for_programs: bool = False, timeout: float = TIMEOUT) -> int:
    """Examine; called by every rank of the job, or of none. One rank writes the report.

    Args:
        for_programs: write JSON.
        timeout: seconds for each step.

    Returns:
        The exit status: 1 where there is a problem.
    """
    # mpi4py warns of a foreign launcher, CuPy of no NCCL: the report has both.
    for category in (RuntimeWarning, UserWarning):
        warnings.simplefilter("ignore", category)
    facts = local_facts()
    show = _Printer(for_programs)
    if not facts.mpi_was_started:
        found = before_mpi(facts)
        if found:
            if facts.launcher is None or facts.launcher.local_rank in (None, 0):  # once a node
                show([facts], found)
            return 1
        with _guarded(facts, timeout + SLACK) as begin:
            return _examine(facts, show, timeout, begin)
    return _examine(facts, show, timeout, lambda step: None)


def _examine(facts: Facts, show: _Printer, timeout: float, begin: Callable[[str], None]) -> int:
    """With MPI. ``begin`` is told each step."""
    context = CommContext()
    try:
        begin("starting MPI")
        bootstrap.mpi()
        begin("meeting the other ranks")
        context.init_distributed_env(backend="auto", timeout=timeout)
    except Exception as error:  # whatever it is, it is what the report is about
        facts.mpi_error = _in_words(error)
        show([facts], findings([facts]))
        return 1
    place(facts, context)
    if facts.size == 1 and facts.launcher is not None and facts.launcher.rank not in (None, 0):
        show.mute()  # a world of its own by the wrong launcher: the first one speaks
    try:
        begin("exchanging Python objects")
        ranks = _try_host(facts, context)
        if can_try_nccl(ranks):
            begin("using NCCL")
            ranks = _try_nccl(facts, ranks, context, show)
    except CupyCollError as error:
        facts.tests["objects"] = Outcome(error=_in_words(error))
        show([facts], findings([facts]))
        return 1
    found = findings(ranks)
    if facts.rank == 0:
        show(ranks, found)
    begin("leaving the job")
    context.destroy()  # nobody leaves before the report is out
    return int(bool(found))


class _Printer:
    """Writes the report, once."""

    def __init__(self, for_programs: bool) -> None:
        self.for_programs = for_programs
        self.done = False

    def mute(self) -> None:
        self.done = True

    def __call__(self, ranks: Sequence[Facts], found: Sequence[Finding]) -> None:
        if self.done:
            return
        self.done = True
        text = json.dumps(as_json(ranks, found), indent=2) + "\n" if self.for_programs else report(ranks, found)
        sys.stdout.write(text)
        sys.stdout.flush()


# ---------------------------------------------------------------------- facts


def local_facts() -> Facts:
    """What this process knows without MPI."""
    facts = Facts(
        host=socket.gethostname(),
        executable=sys.executable,
        launcher=launcher_of(os.environ),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        device_files=sum(path.name[6:].isdecimal() for path in Path("/dev").glob("nvidia*")),
        shares_gpu=os.environ.get(bootstrap.SHARED_GPU_VARIABLE) == "1",
        mpi_was_started=bootstrap.mpi_is_running(),
    )
    if facts.launcher is not None:
        facts.rank = facts.launcher.rank or 0
        facts.local_rank = facts.launcher.local_rank or 0
        facts.size = facts.launcher.size or 1
        facts.local_size = facts.launcher.local_size or 1
    with suppress(OSError):
        room = os.statvfs("/dev/shm")
        facts.shm_size, facts.shm_free = room.f_frsize * room.f_blocks, room.f_frsize * room.f_bavail
    try:
        facts.mpi = library_in_words(bootstrap.mpi_library())
        facts.mpi_file = bootstrap.loaded_file("libmpi.so") or bootstrap.loaded_file("libmpi")
    except TransportError as error:
        facts.mpi_error = str(error)
    facts.versions = {"Python": platform.python_version(), "torch": torch.__version__}
    facts.versions |= {name: _version(name) for name in ("cupy_coll", "mpi4py")}
    try:
        facts.versions["CuPy"] = str(importlib.import_module("cupy").__version__)
        facts.nccl, facts.nccl_file = nccl.version(), installed_library()
    except TransportError as error:
        facts.nccl_error = str(error)
    except Exception as error:  # whatever a broken installation raises
        facts.versions.setdefault("CuPy", "")
        facts.nccl_error = f"CuPy cannot be imported: {_in_words(error)}"
    return facts


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def place(facts: Facts, context: CommContext) -> None:
    """Add where MPI places this rank, and the GPU that it takes there."""
    facts.rank, facts.size = context.get_global_rank(), context.get_world_size()
    facts.local_rank, facts.local_size = context.get_in_node_rank(), context.get_local_world_size()
    try:
        device = _device()
        if device is None:
            return
        facts.gpus = device.count()
        index = bootstrap.logical_device(facts.local_rank, facts.local_size, facts.gpus)
        name, bus = device.describe(index)
        facts.gpu = Gpu(index, name, device.identity(index), bus)
    except Exception as error:  # CUDA's, by torch
        facts.gpu_error = _in_words(error)


def _device() -> Device | None:
    return next((device for device in devices() if device.count()), None)


def _in_words(error: Exception) -> str:
    text = str(error) or "no text"
    return text if isinstance(error, CupyCollError) else f"{type(error).__name__}: {text}"


# ---------------------------------------------------------------------- tiny collectives


def _try_host(facts: Facts, context: CommContext) -> list[Facts]:
    """Try objects, which bring the facts of all ranks, and tensors in host memory.

    Raises:
        CupyCollError: objects do not travel.
    """
    world = context.get_group(CommMode.GLOBAL)
    assert world is not None
    everybody = list(range(facts.size))

    def objects() -> None:
        got = all_gather_objects(world.objects, "doctor", "rank", facts.rank)
        if got != everybody:
            raise TransportError(f"got {got} from the ranks, expected {everybody}")

    facts.tests["objects"] = _outcome(objects)
    if facts.tests["objects"].error:
        raise TransportError(facts.tests["objects"].error)
    ones = torch.empty(1)

    def tensors() -> None:
        ones.fill_(1)
        world.host.all_reduce(ones, ReduceOp.SUM)
        _expect(ones, facts.size)

    facts.tests["host"] = _outcome(tensors)
    return all_gather_objects(world.objects, "doctor", "facts", facts)


def _try_nccl(facts: Facts, ranks: list[Facts], context: CommContext, show: _Printer) -> list[Facts]:
    """Try tensors on GPUs. Where NCCL's start blocks the job has to end; the report is written before that."""
    world, device = context.get_group(CommMode.GLOBAL), _device()
    assert world is not None
    assert device is not None
    assert facts.gpu is not None
    index = facts.gpu.index

    def last_word(error: str) -> None:
        facts.tests["nccl"] = Outcome(error=error)
        ranks[facts.rank] = facts
        if facts.rank == 0:
            show(ranks, findings(ranks))

    lifecycle = context._lifecycle
    assert lifecycle is not None
    watched = _BeforeTheEnd(lambda: last_word(str(lifecycle.failure or "the job is ended by a failure of NCCL")))
    lifecycle.watch(watched)
    try:
        facts.tests["nccl"] = _outcome(lambda: _all_reduce_on(device, index, world))
    finally:
        lifecycle.unwatch(watched)
    if facts.tests["nccl"].error:
        last_word(facts.tests["nccl"].error)  # at once: the others may still be inside NCCL, and end the job
    return all_gather_objects(world.objects, "doctor", "facts", facts)


def _all_reduce_on(device: Device, index: int, world: Group) -> None:
    with device.at(index):
        ones = device.empty(1, torch.float32, index).fill_(1)
        world.warm_up()
        world.transport_for(ones).all_reduce(ones, ReduceOp.SUM)
        _expect(ones, world.size)


class _BeforeTheEnd:
    """What the lifecycle calls before it ends the job (see ``lifecycle.Watched``)."""

    def __init__(self, abort: Callable[[], None]) -> None:
        self.abort = abort

    def poll(self) -> None:
        pass

    def drain(self) -> None:
        pass


def _expect(tensor: torch.Tensor, value: float) -> None:
    got = float(tensor)
    if got != value:
        raise TransportError(f"all_reduce of ones on {value:g} ranks gave {got:g}")


def _outcome(collective: Callable[[], None]) -> Outcome:
    """Once to connect, then the median of a few."""
    try:
        collective()
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            collective()
            times.append(time.perf_counter() - begin)
    except Exception as error:  # MPI's, NCCL's, CUDA's
        return Outcome(error=_in_words(error))
    return Outcome(statistics.median(times))


# ---------------------------------------------------------------------- the child process


@contextmanager
def _guarded(facts: Facts, limit: float) -> Iterator[Callable[[str], None]]:
    """Look after the block by a child process: it ends this one where a step takes longer than ``limit`` seconds, and
    says in which step it stood, or was killed. Gives the function that tells it the next step.
    """
    reader, writer = os.pipe()
    watched = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os.close(writer)
            _look_after(watched, reader, f"rank {facts.rank} on {facts.host}", shm_in_words(facts), limit)
        finally:
            os._exit(0)
    os.close(reader)

    def begin(step: str) -> None:
        with suppress(BrokenPipeError):  # somebody has ended the child
            os.write(writer, f"{step}\n".encode())

    try:
        yield begin
    finally:
        begin("")
        os.close(writer)
        os.waitpid(child, 0)


def _look_after(watched: int, reader: int, who: str, shm: str, limit: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that is for the program
    step = "the beginning"
    while True:
        if not select.select([reader], [], [], limit)[0]:
            _say(
                f"doctor: {who} has not got through {step} within {limit:g} s, and is ended. All ranks must start, "
                f"by the launcher that belongs to the MPI library; /dev/shm must have room: {shm} (docs/install.md)"
            )
            os.kill(watched, signal.SIGKILL)
            return
        told = os.read(reader, 1 << 16).decode()
        if not told:
            _say(f"doctor: {who} was ended in {step}, by MPI or by a signal")
            return
        step = told.splitlines()[-1]
        if not step:
            return


def _say(line: str) -> None:
    os.write(2, f"{line}\n".encode())  # in one write, or ranks' lines mix
