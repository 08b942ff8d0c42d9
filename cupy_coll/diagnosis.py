"""What the facts of all ranks mean: problems with advice, and the report. Pure: nothing is asked or sent here."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cupy_coll.bootstrap import launcher_local_rank, visible_devices
from cupy_coll.check import ranks_in_words
from cupy_coll.transport.nccl_members import Member, in_words, trouble_of

__all__ = [
    "Facts",
    "Finding",
    "Gpu",
    "Launcher",
    "Outcome",
    "as_json",
    "before_mpi",
    "can_try_nccl",
    "findings",
    "launcher_of",
    "library_in_words",
    "report",
    "shm_in_words",
]

MPICH_SHM = 5_500_000  # bytes of /dev/shm a rank: MPICH 5.0 took 22, 86, 345 MB on 4, 16, 64 ranks of one node
# A rank that comes late sees less of it free, for others have begun to start MPI: up to a seventh of what all will need
# was seen. Ranks must decide alike, or some wait in vain for the others.
FREE_BEFORE_MPI = 0.5
MPICH, OPEN_MPI = "MPICH", "Open MPI"

# By the variable that tells the rank within the node: the launcher, the family of MPI libraries that it starts (""
# where it may be any), and its variables for rank, number of ranks, and ranks on the node ("" where it has none).
LAUNCHERS = {
    "OMPI_COMM_WORLD_LOCAL_RANK": (
        "mpiexec of Open MPI",
        OPEN_MPI,
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPI_LOCALRANKID": ("mpiexec of MPICH or Intel MPI", MPICH, "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    "MV2_COMM_WORLD_LOCAL_RANK": (
        "mpiexec of MVAPICH",
        MPICH,
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    "PALS_LOCAL_RANKID": ("mpiexec of PALS", "", "PALS_RANKID", "PMI_SIZE", "PMI_LOCAL_SIZE"),
    "JSM_NAMESPACE_LOCAL_RANK": ("jsrun", "", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_SIZE"),
    "FLUX_TASK_LOCAL_ID": ("flux", "", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", ""),
    # Not SLURM_NTASKS, which a batch script has too, where nothing has been started by srun.
    "SLURM_LOCALID": ("srun", "", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ""),
}


@dataclass(frozen=True)
class Launcher:
    """What a launcher tells a process in variables of the environment; None where it does not say."""

    name: str
    family: str
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Gpu:
    """The GPU that a rank takes."""

    index: int
    name: str
    uuid: str
    bus: str


@dataclass(frozen=True)
class Outcome:
    """Of a tiny collective: seconds, or why it failed."""

    seconds: float = 0.0
    error: str = ""


@dataclass
class Facts:
    """What one rank knows.

    Attributes:
        versions: Python's and of packages, by name; empty where a package is not there.
        mpi, mpi_file, mpi_error: the MPI library in words and its file; why it cannot be used.
        mpi_was_started: before /dev/shm was looked at.
        shm_size, shm_free: bytes of /dev/shm; -1 where there is none.
        visible: CUDA_VISIBLE_DEVICES; None where it is not set.
        device_files: how many /dev/nvidia<N> there are.
        gpus, gpu, gpu_error: how many this process sees, the one it takes, why it takes none.
        nccl, nccl_file, nccl_error: the version as ncclGetVersion gives it, 0 where there is none.
        tests: outcomes of "objects", "host", "nccl", as far as they were tried.
    """

    host: str
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    executable: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    launcher: Launcher | None = None
    mpi: str = ""
    mpi_file: str = ""
    mpi_error: str = ""
    mpi_was_started: bool = False
    shm_size: int = -1
    shm_free: int = -1
    visible: str | None = None
    device_files: int = 0
    gpus: int = 0
    gpu: Gpu | None = None
    gpu_error: str = ""
    nccl: int = 0
    nccl_file: str = ""
    nccl_error: str = ""
    shares_gpu: bool = False
    tests: dict[str, Outcome] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """A problem, and what to do."""

    problem: str
    advice: str


# ---------------------------------------------------------------------- from the environment


def launcher_of(environ: Mapping[str, str]) -> Launcher | None:
    """The launcher that started this process; None where no variable tells of one."""
    told = launcher_local_rank(environ)
    if told is None:
        return None
    local_rank, variable = told
    name, family, *others = LAUNCHERS[variable]
    numbers = [int(environ[one]) if environ.get(one, "").isdecimal() else None for one in others]
    read = {one: environ[one] for one in (*others, variable) if one in environ}
    rank, size, local_size = numbers
    return Launcher(name, family, rank, size, local_rank, local_size, read)


def library_in_words(text: str) -> str:
    """``MPICH 5.0.2`` from what MPI_Get_library_version says."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    found = re.match(r"(.*?)(?: Library)?(?: Version)?\s*:?\s+v?(\d[\w.]*)", line, re.IGNORECASE)
    return f"{found[1]} {found[2]}" if found else line


def _family(library: str) -> str:
    if OPEN_MPI in library:
        return OPEN_MPI
    return MPICH if any(name in library for name in ("MPICH", "Intel", "CRAY")) else ""


# ---------------------------------------------------------------------- problems


def before_mpi(facts: Facts) -> list[Finding]:
    """Problems of one process for which MPI must not be started: it would hang, or kill the process."""
    if facts.mpi_error:
        return _of_mpi([facts])
    local_size = facts.launcher.local_size if facts.launcher else None
    facts = dataclasses.replace(facts, local_size=local_size or 1)
    foreign = _foreign(facts)
    return ([foreign] if foreign else []) + _of_shm([facts], FREE_BEFORE_MPI)


def can_try_nccl(ranks: Sequence[Facts]) -> bool:
    """Whether every rank has a GPU and NCCL, and nothing is known that NCCL would refuse."""
    return all(facts.gpu and facts.nccl for facts in ranks) and _trouble(ranks) is None


def findings(ranks: Sequence[Facts]) -> list[Finding]:
    """All problems, in the order in which they are worth solving."""
    parts = (_of_mpi, _of_launcher, _of_shm, _of_versions, _of_gpus, _of_nccl, _of_tests)
    return [finding for part in parts for finding in part(ranks)]


def _of_mpi(ranks: Sequence[Facts]) -> list[Finding]:
    return [
        Finding(
            f"{_who(where)}: {text}",
            "docs/install.md says which MPI libraries work and how mpi4py finds one. MPI4PY_LIBMPI names the library's "
            "file",
        )
        for text, where in _by(ranks, lambda facts: facts.mpi_error)
    ]


def _foreign(facts: Facts) -> Finding | None:
    """The launcher belongs to another MPI than the library, which can be seen before MPI starts."""
    launcher, family = facts.launcher, _family(facts.mpi)
    if launcher is None or not launcher.family or not family or launcher.family == family:
        return None
    return Finding(
        f"this process was started by {launcher.name}, but the MPI library of mpi4py is {facts.mpi}"
        f"{f' ({facts.mpi_file})' if facts.mpi_file else ''}",
        _of_one_kind(facts),
    )


def _of_launcher(ranks: Sequence[Facts]) -> list[Finding]:
    found = []
    for facts in ranks[:1]:  # where worlds are apart, each is one of its own
        launcher = facts.launcher
        if launcher is None or launcher.size in (None, facts.size):
            continue
        words = ", ".join(f"{name}={value}" for name, value in launcher.variables.items())
        problem = (
            f"{launcher.name} started {launcher.size} ranks ({words}), but MPI counts {facts.size}: each process "
            "believes that it is a job of its own"
            if facts.size == 1
            else f"{launcher.name} tells of {launcher.size} ranks ({words}), but MPI counts {facts.size}"
        )
        found.append(Finding(f"{problem}. The MPI library is {facts.mpi or 'unknown'}", _of_one_kind(facts)))
    return found


def _of_one_kind(facts: Facts) -> str:
    """How to get a launcher that fits the library."""
    family = _family(facts.mpi)
    if facts.launcher and facts.launcher.name == "srun":
        kind = {MPICH: "--mpi=pmi2", OPEN_MPI: "--mpi=pmix"}.get(family, "--mpi=pmi2 or --mpi=pmix")
        return f"srun {kind} (`srun --mpi=list` shows what there is), or start with mpiexec inside the allocation"
    return (
        f"start with the mpiexec of {family or 'that library'} (./mpi_launch.sh takes the one beside the Python), or "
        "let mpi4py load the launcher's own library: MPI4PY_LIBMPI=/path/to/libmpi.so (docs/install.md)"
    )


def _of_shm(ranks: Sequence[Facts], free_share: float = 1.0) -> list[Finding]:
    """``free_share``: of what MPI needs, how much has to be free."""
    found = []
    for host in dict.fromkeys(facts.host for facts in ranks):
        node = [facts for facts in ranks if facts.host == host]
        first = node[0]
        if _family(first.mpi) != MPICH or first.shm_size < 0:
            continue
        need = MPICH_SHM * first.local_size
        # The rank that looked first saw the least of what this job itself takes.
        free = max(facts.shm_size if facts.mpi_was_started else facts.shm_free for facts in node)
        if first.shm_size >= need and free >= free_share * need:
            continue
        ranks_there = f"{first.local_size} rank{'s' * (first.local_size != 1)}"
        found.append(
            Finding(
                f"/dev/shm of {host} has {_bytes(first.shm_size)}, {_bytes(free)} of it free; {first.mpi} needs about "
                f"{_bytes(need)} for {ranks_there} on a node, and hangs or dies by SIGBUS without",
                "make it larger: `docker run --shm-size=1g` (or --ipc=host), `mount -o remount,size=1g /dev/shm`; and "
                "remove what killed jobs have left there: /dev/shm/mpich_shm_* (./mpi_launch.sh does)",
            )
        )
    return found


def _of_versions(ranks: Sequence[Facts]) -> list[Finding]:
    found = []
    names = dict.fromkeys(name for facts in ranks for name in facts.versions)
    values: dict[str, Callable[[Facts], str]] = {
        name: lambda facts, name=name: facts.versions.get(name, "") or "none"  # type: ignore[misc]
        for name in names
    }
    values["MPI"] = lambda facts: facts.mpi or "unknown"
    for name, value in values.items():
        sides = _by(ranks, value)
        if len(sides) > 1:
            words = "; ".join(f"{text} on {_who(where)}" for text, where in sides)
            found.append(
                Finding(
                    f"the ranks have different versions of {name}: {words}",
                    "start the same Python, by its full path, on all hosts (CUPY_COLL_PYTHON for ./mpi_launch.sh)",
                )
            )
    return found


def _of_gpus(ranks: Sequence[Facts]) -> list[Finding]:
    found = [
        Finding(
            f"{_who(where)}: {text}",
            "start as many ranks a node as it has GPUs, or ask the scheduler for one GPU a rank; `nvidia-smi -L` lists "
            "them, CUDA_VISIBLE_DEVICES limits them",
        )
        for text, where in _by(ranks, lambda facts: facts.gpu_error)
    ]

    def unseen(facts: Facts) -> str:
        hidden = facts.visible is not None and not visible_devices({"CUDA_VISIBLE_DEVICES": facts.visible})
        if facts.gpus or not facts.device_files or hidden:
            return ""
        return (
            f"{facts.host} has {facts.device_files} NVIDIA GPU{'s' * (facts.device_files != 1)} in /dev, but torch "
            f"{facts.versions.get('torch', '')} sees none"
        )

    unseen_by = _by(ranks, unseen)
    found += [
        Finding(
            f"{_who(where)}: {text}",
            "install a torch that is built for the driver's CUDA (docs/install.md), and look at CUDA_VISIBLE_DEVICES; "
            "`python -c 'import torch; torch.zeros(1).cuda()'` says why",
        )
        for text, where in unseen_by
    ]
    without = [facts for facts in ranks if not facts.gpus]
    if without and len(without) < len(ranks) and not unseen_by:
        found.append(
            Finding(
                f"{_who(without)} see no GPU, the others do"
                if len(without) > 1
                else f"{_who(without)} sees no GPU, the others do",
                "ask the scheduler for GPUs on every node, and for the same number",
            )
        )
    return found


def _of_nccl(ranks: Sequence[Facts]) -> list[Finding]:
    found = [
        Finding(f"{_who(where)}: there is a GPU, but NCCL cannot be used", text)
        for text, where in _by(ranks, lambda facts: facts.nccl_error if facts.gpu else "")
    ]
    trouble = _trouble(ranks)
    if trouble is None:
        return found
    what, advice = trouble
    shown = {facts.visible for facts in ranks if facts.gpu}
    if len(ranks) > len({facts.gpu.uuid for facts in ranks if facts.gpu}):
        advice = (
            "start at most one rank a GPU, and give each rank a GPU of its own: where a scheduler shows each rank one "
            f"GPU only, it must be another one for each (CUDA_VISIBLE_DEVICES here: {_visible(shown)}). {advice}"
        )
    return [*found, Finding(what, advice)]


def _trouble(ranks: Sequence[Facts]) -> tuple[str, str] | None:
    """What NCCL would refuse of the ranks that have a GPU and NCCL."""
    using = [facts for facts in ranks if facts.gpu and facts.nccl]
    members = [
        Member(facts.host, facts.gpu.uuid, facts.nccl, facts.nccl_file, facts.shares_gpu)
        for facts in using
        if facts.gpu
    ]
    return trouble_of(members, [facts.rank for facts in using])


TESTS = {
    "objects": (
        "Python objects over MPI",
        "ranks of one job must reach each other: look at the other ranks' output, at /dev/shm, and at what a firewall "
        "or the choice of a network interface does (docs/failures.md explains the messages)",
    ),
    "host": (
        "CPU tensors over MPI",
        "objects may travel where tensors do not: another MPI library, or its debugging output, tells more "
        "(docs/failures.md explains the messages)",
    ),
    "nccl": (
        "GPU tensors over NCCL",
        "NCCL_DEBUG=INFO shows what NCCL tries. NCCL_SOCKET_IFNAME names its network interface, NCCL_P2P_DISABLE=1 and "
        "NCCL_IB_DISABLE=1 tell which path fails, a container needs --shm-size=1g (docs/nccl.md)",
    ),
}


def _of_tests(ranks: Sequence[Facts]) -> list[Finding]:
    return [
        Finding(f"{_who(where)}: {title} do not work: {text}", advice)
        for name, (title, advice) in TESTS.items()
        for text, where in _by(ranks, lambda facts, name=name: facts.tests.get(name, Outcome()).error)  # type: ignore[misc]
    ]


def _by(ranks: Sequence[Facts], text: Callable[[Facts], str]) -> list[tuple[str, list[Facts]]]:
    """The different texts and who has them; ranks with none are left out."""
    found: dict[str, list[Facts]] = {}
    for facts in ranks:
        words = text(facts)
        if words:
            found.setdefault(words, []).append(facts)
    return list(found.items())


def _who(ranks: Sequence[Facts]) -> str:
    numbers = [facts.rank for facts in ranks]
    if len(numbers) > 8 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]} to {numbers[-1]}"
    return ranks_in_words(numbers)


# ---------------------------------------------------------------------- the report


def as_json(ranks: Sequence[Facts], found: Sequence[Finding]) -> dict[str, Any]:
    """The report for programs."""
    return {
        "ranks": [dataclasses.asdict(facts) for facts in ranks],
        "problems": [dataclasses.asdict(finding) for finding in found],
    }


def report(ranks: Sequence[Facts], found: Sequence[Finding]) -> str:
    """The report for people: a table with a line for each rank, what ranks have in common, problems."""
    hosts = len({facts.host for facts in ranks})
    size = ranks[0].size
    title = f"cupy_coll doctor: {size} rank{'s' * (size != 1)}, {hosts} host{'s' * (hosts != 1)}"
    if size != len(ranks):
        title += f"; this is {_who(ranks)} alone"
    blocks = [title, _table(_rows(ranks)), "\n".join(_common(ranks)), _problems(found)]
    return "\n\n".join(blocks) + "\n"


def _rows(ranks: Sequence[Facts]) -> list[list[str]]:
    gpus = any(facts.gpu for facts in ranks)
    rows = [["rank", "host", "in node", *(["GPU", "bus", "UUID"] if gpus else []), "objects", "CPU tensors", "NCCL"]]
    for facts in ranks:
        gpu = facts.gpu
        names = [f"{gpu.index}: {gpu.name}", gpu.bus, gpu.uuid] if gpu else ["none", "", ""]
        times = [_cell(facts.tests.get(name)) for name in TESTS]
        rows.append([str(facts.rank), facts.host, _place(facts), *(names if gpus else []), *times])
    return rows


def _place(facts: Facts) -> str:
    place = f"{facts.local_rank} of {facts.local_size}"
    told = facts.launcher.local_rank if facts.launcher else None
    return place if told in (None, facts.local_rank) else f"{place} (launcher: {told})"


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "not tried"
    return "FAILED" if outcome.error else f"{outcome.seconds * 1e6:,.0f} us"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _common(ranks: Sequence[Facts]) -> list[str]:
    def launcher(facts: Facts) -> str:
        if facts.launcher is None:
            return "none: no launcher's variable is set"
        return f"{facts.launcher.name} ({', '.join(facts.launcher.variables)})"

    def nccl(facts: Facts) -> str:
        if not facts.nccl:
            return f"none: {facts.nccl_error.split(':')[0]}" if facts.nccl_error else "none"
        return f"{in_words(facts.nccl)}, {facts.nccl_file or 'file unknown'}"

    def gpus(facts: Facts) -> str:
        return f"{facts.gpus} visible, CUDA_VISIBLE_DEVICES {_visible({facts.visible})}"

    def version(name: str) -> Callable[[Facts], str]:
        return lambda facts: facts.versions[name] or "none"

    lines = _line("launcher", ranks, launcher)
    lines += _line("MPI", ranks, lambda facts: ", ".join(filter(None, (facts.mpi, facts.mpi_file))) or "none")
    lines += _line("Python", ranks, lambda facts: f"{facts.versions.get('Python', '')}, {facts.executable}")
    for name in ranks[0].versions:
        if name != "Python":
            lines += _line(name, ranks, version(name))
    lines += _line("NCCL", ranks, nccl)
    lines += _line("GPUs", ranks, gpus)
    first = [facts for facts in ranks if facts.local_rank == 0 or len(ranks) == 1]
    return lines + _line("/dev/shm", first, shm_in_words, who=lambda some: ", ".join(facts.host for facts in some))


def shm_in_words(facts: Facts) -> str:
    """``64 MB, 50 MB free``."""
    return "none" if facts.shm_size < 0 else f"{_bytes(facts.shm_size)}, {_bytes(facts.shm_free)} free"


def _line(
    label: str,
    ranks: Sequence[Facts],
    text: Callable[[Facts], str],
    who: Callable[[Sequence[Facts]], str] = _who,
) -> list[str]:
    """One line where all ranks have the same, else one for each of the differing texts."""
    sides = _by(ranks, text)
    return [f"{label:<10}{words}{f' ({who(where)})' if len(sides) > 1 else ''}" for words, where in sides]


def _problems(found: Sequence[Finding]) -> str:
    if not found:
        return "no problem found"
    return "\n".join(f"problem: {one.problem}\n  advice: {one.advice}" for one in found)


def _visible(values: set[str | None]) -> str:
    return ", ".join(sorted("not set" if value is None else repr(value) for value in values))


def _bytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB" if count < 1e10 else f"{count / 1e9:,.1f} GB"
