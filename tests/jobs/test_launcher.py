"""mpi_launch.sh: what it starts, with which Python, what becomes of failures and signals, and how it makes .venv.

Making .venv is tested with a stand-in for pip and for the Python that makes it: nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from starting import ROOT, Finished, clean_environment, run_command

from cupy_coll.bootstrap import mpi_library

LAUNCHER = str(ROOT / "mpi_launch.sh")
LIMIT = 40.0


def launch(*words: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> Finished:
    return run_command([LAUNCHER, *words], LIMIT, env, cwd)


def script_file(path: Path, source: str) -> Path:
    """An executable file, its folder made too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# --- What the script sees --------------------------------------------------------------------------------------------

REPORT = """
import json, os, sys
from mpi4py import MPI
seen = [sys.argv, sys.path[0], os.getcwd(), os.environ["OMP_NUM_THREADS"], __name__]
seen = MPI.COMM_WORLD.gather(seen)
if seen:
    print(json.dumps(seen), flush=True)
"""


def test_arguments_untouched(tmp_path: Path) -> None:
    """Also from a folder with a blank in its name, and options that the launcher has too; sys.path as by python."""
    script = script_file(tmp_path / "a b" / "report.py", REPORT)
    arguments = ["1   2   3", "", "*", "x y", "z", "--help", "-n", "7", "--", "$HOME", "it's"]
    result = launch("-n", "3", "a b/report.py", *arguments, env={"OMP_NUM_THREADS": "5"}, cwd=tmp_path)
    assert result.status == 0, result.output
    expected = [["a b/report.py", *arguments], str(script.parent), str(tmp_path), "5", "__main__"]
    assert json.loads(result.output) == [expected] * 3


def test_module(tmp_path: Path) -> None:
    script_file(tmp_path / "report.py", REPORT)
    result = launch("-n", "2", "-m", "report", "-n", "x y", cwd=tmp_path)
    assert result.status == 0, result.output
    for argv, _, _, _, name in json.loads(result.output):
        assert argv == [str(tmp_path / "report.py"), "-n", "x y"]
        assert name == "__main__"


@pytest.mark.parametrize("ranks", [1, 4])
def test_threads(ranks: int, tmp_path: Path) -> None:
    """Cores / ranks where OMP_NUM_THREADS is unset (empty counts as unset), at least 1."""
    script = script_file(tmp_path / "report.py", REPORT)
    result = launch("-n", str(ranks), str(script), env={"OMP_NUM_THREADS": ""})
    assert result.status == 0, result.output
    cores = len(os.sched_getaffinity(0))
    assert [seen[3] for seen in json.loads(result.output)] == [str(max(1, cores // ranks))] * ranks


def test_standard_input(tmp_path: Path) -> None:
    script = script_file(
        tmp_path / "read.py",
        "import sys; from mpi4py import MPI\nif MPI.COMM_WORLD.rank == 0: print(sys.stdin.read().upper())",
    )
    done = subprocess.run(
        [LAUNCHER, "-n", "2", str(script)],
        input="words",
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=LIMIT,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "WORDS")


# --- How a job ends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before_mpi", "after_mpi", "status", "words"),
    [
        ("", "pass", 0, ""),
        ("", "raise ValueError('on purpose')", 1, "ValueError: on purpose"),
        ("", "sys.exit(3)", 3, ""),
        ("raise ValueError('early')", "", 1, "ValueError: early"),
    ],
    ids=["success", "exception", "exit", "before the import of MPI"],
)
def test_status(before_mpi: str, after_mpi: str, status: int, words: str, tmp_path: Path) -> None:
    """What rank 1 does ends the job, though rank 0 waits for it."""
    script = script_file(
        tmp_path / "script.py",
        f"""
import os, sys
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    {before_mpi or "pass"}
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    {after_mpi or "pass"}
MPI.COMM_WORLD.Barrier()
""",
    )
    result = launch("-n", "2", str(script))
    assert result.status == status, result.output
    assert words in result.output


@pytest.mark.parametrize(
    ("ends", "told", "status"), [("7", 9, 7), ("-1", 9, 255), ("0", 9, 9), ("7", 11, 11), ("7", 7, 7)]
)
def test_status_of_a_killed_rank(ends: str, told: int, status: int, environment: Path, tmp_path: Path) -> None:
    """Hydra may tell 9, of a rank that it killed, instead of the status that the rank which failed had."""
    script_file(
        environment.parent / "mpiexec",
        f"""#!/bin/sh
[ "$1" = --version ] && echo HYDRA build details: && exit
shift 2
"$@"
exit {told}
""",
    )
    script = script_file(tmp_path / "script.py", f"import sys\nsys.exit({ends})")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {"CUPY_COLL_PYTHON": str(environment), "TMPDIR": str(temporary)}
    result = launch("-n", "1", str(script), env=env)
    assert result.status == status, result.output
    assert not list(temporary.iterdir())
    result = launch("-n", "1", str(script), env=env | {"TMPDIR": str(tmp_path / "missing")})
    assert result.status == told, result.output


WAITING = """
import os, signal, sys, time
from mpi4py import MPI
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    MPI.COMM_WORLD.Barrier()
path = os.path.join(os.path.dirname(__file__), str(MPI.COMM_WORLD.rank))
with open(path + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename(path + ".new", path)
time.sleep(60)
"""


@contextlib.contextmanager
def waiting_job(
    folder: Path, *arguments: str, env: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A job of two ranks that sleep, and their process ids."""
    script = script_file(folder / "waiting.py", WAITING)

    def signals_as_in_a_terminal() -> None:  # a shell cannot trap what it was started to ignore
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

    process = subprocess.Popen(
        [LAUNCHER, "-n", "2", str(script), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean_environment(env),
        start_new_session=True,
        preexec_fn=signals_as_in_a_terminal,
    )
    files = [folder / str(rank) for rank in (0, 1)]
    try:
        deadline = time.monotonic() + LIMIT
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline, "the ranks did not start"
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.02)
        yield process, [int(file.read_text()) for file in files]
    finally:
        for file in files:
            with contextlib.suppress(OSError):
                os.kill(int(file.read_text()), signal.SIGKILL)
        process.kill()
        process.communicate()


def running(pid: int) -> bool:
    """Whether it runs; one that has ended and only waits to be collected by its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_ended(pids: list[int]) -> None:
    deadline = time.monotonic() + 3
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [pid for pid in pids if running(pid)] == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_ends_the_job(number: int, status: int, tmp_path: Path) -> None:
    with waiting_job(tmp_path) as (process, pids):
        process.send_signal(number)
        output, _ = process.communicate(timeout=10)
        assert process.returncode == status, output
        assert_ended(pids)


def test_second_signal_kills(tmp_path: Path) -> None:
    """Ranks that ignore SIGTERM would keep mpiexec waiting; the same signal at once counts as one."""
    with waiting_job(tmp_path, "stubborn") as (process, pids):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        time.sleep(2.1)
        assert process.poll() is None
        assert all(map(running, pids))
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=10)
        assert process.returncode == 143, output
        assert_ended(pids)


# --- Options ---------------------------------------------------------------------------------------------------------


def test_dry_run(tmp_path: Path) -> None:
    """A line that a shell can run, and nothing done."""
    script = script_file(tmp_path / "a b" / "leave a trace.py", "open('trace', 'w')")
    result = launch("--dry-run", "-n", "2", str(script), "it's", "*", "", cwd=tmp_path)
    assert result.status == 0, result.output
    assert result.output.count("\n") == 1
    words = shlex.split(result.output)
    assert words[-4:] == [str(script), "it's", "*", ""]
    assert Path(words[0]).name == "mpiexec"  # OMP_NUM_THREADS is set, so that nothing stands before it
    assert words[1:3] == ["-n", "2"]
    assert os.listdir(tmp_path) == ["a b"]


def test_dry_run_of_the_tests() -> None:
    """One part in one process, the jobs, and two on each number of ranks; pytest's own arguments reach all of them."""
    result = launch("--dry-run", "--test", "--slow", "-k", "a or b")
    assert result.status == 0, result.output
    commands = [shlex.split(line) for line in result.output.splitlines()]
    tail = ["--slow", "-k", "a or b"]
    assert commands[0][1:] == ["-m", "pytest", "-n", "2", "--dist", "loadscope", "tests/unit", *tail]
    assert commands[1][1:] == ["-m", "pytest", "tests/jobs", *tail]
    assert [command[command.index("-n") + 1] for command in commands[2:]] == list("11223344")
    assert [command[-6:] for command in commands[2:]] == [
        ["-m", "pytest", tests, *tail] for _ in range(4) for tests in ("tests/ranks", "tests/nccl")
    ]


def test_help() -> None:
    result = launch("--help")
    assert result.status == 0
    for word in ("-n N", "--setup", "--test", "--slow", "--dev", "--dry-run", "CUPY_COLL_PYTHON", "OMP_NUM_THREADS"):
        assert word in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Start a Python script on MPI ranks"),
        (["--banana", "x.py"], "unknown option: --banana"),
        (["nowhere.py"], "no such script: nowhere.py"),
        (["-n", "0", "x.py"], "-n needs a number of ranks, got '0'"),
        (["-n", "two", "x.py"], "-n needs a number of ranks, got 'two'"),
        (["-n"], "-n needs a number"),
        (["-m"], "-m needs the name of a module"),
        (["--setup", "x.py"], "--setup takes no script, got: x.py"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use(words: list[str], message: str) -> None:
    result = launch(*words)
    assert result.status == 2
    assert message in result.output


# --- Which Python, which mpiexec -------------------------------------------------------------------------------------


def make_environment(folder: Path) -> Path:
    """A virtual environment that sees what this Python sees, but has no commands of its own; its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=LIMIT)
    site = next(folder.glob("lib/python*/site-packages"))
    # Through addsitedir, so that an editable installation is found too.
    (site / "tests.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return folder / "bin" / "python"


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    return make_environment(tmp_path / "environment")


@pytest.fixture
def hello(tmp_path: Path) -> str:
    return str(script_file(tmp_path / "hello.py", "print('hello')"))


def test_python_of_the_environment_variable(environment: Path, hello: str) -> None:
    script_file(environment.parent / "mpiexec", "#!/bin/sh\necho HYDRA build details:")
    result = launch("--dry-run", hello, env={"CUPY_COLL_PYTHON": str(environment)})
    assert result.status == 0, result.output
    words = shlex.split(result.output)
    assert words[0] == str(environment.parent / "mpiexec")
    assert str(environment) in words


def test_active_environment(environment: Path, hello: str) -> None:
    env = {"CUPY_COLL_PYTHON": "", "VIRTUAL_ENV": str(environment.parents[1])}
    assert launch("--setup", env=env).output == f"{environment}\n"


@pytest.mark.parametrize("kind", ["missing", "empty"])
def test_unusable_python(kind: str, tmp_path: Path, hello: str) -> None:
    python = tmp_path / "python"
    if kind == "empty":
        script_file(python, f'#!/bin/sh\nexec {sys.executable} -S "$@"')  # sees no packages at all
    result = launch(hello, env={"CUPY_COLL_PYTHON": str(python)})
    assert result.status == 1
    assert f"CUPY_COLL_PYTHON is {python}, which " in result.output
    assert {"missing": "not an executable", "empty": "pip install"}[kind] in result.output


@pytest.mark.parametrize("version", ["mpiexec (Open MPI) 5.0.11", "mpiexec.openmpi (OpenRTE) 4.1.4"])
def test_open_mpi(version: str, environment: Path, hello: str) -> None:
    script_file(environment.parent / "mpiexec", f"#!/bin/sh\necho '{version}'")
    result = launch("--dry-run", "-n", "3", hello, env={"CUPY_COLL_PYTHON": str(environment)})
    assert result.status == 0, result.output
    words = shlex.split(result.output)
    assert words[1:6] == ["-n", "3", "--oversubscribe", "--bind-to", "none"]
    assert (words[6] == "--allow-run-as-root") == (os.geteuid() == 0)


def test_unknown_mpiexec(environment: Path, hello: str) -> None:
    script_file(environment.parent / "mpiexec", "#!/bin/sh\necho some other thing")
    result = launch(hello, env={"CUPY_COLL_PYTHON": str(environment)})
    assert result.status == 1
    assert "names neither MPICH nor Intel MPI nor Open MPI nor PALS, but: some other thing" in result.output


def test_no_mpiexec(environment: Path, hello: str, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "dirname", "env", "flock", "nproc", "setsid", "sha256sum"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    result = launch(hello, env={"CUPY_COLL_PYTHON": str(environment), "PATH": str(tools)})
    assert result.status == 1
    assert "found no mpiexec, neither beside" in result.output


@pytest.mark.skipif("Open MPI" in mpi_library(), reason="the other way round than here")
def test_open_mpis_mpiexec_for_another_mpi(environment: Path, hello: str) -> None:
    script_file(environment.parent / "mpiexec", "#!/bin/sh\necho 'mpiexec (Open MPI) 5.0.11'")
    own = sorted(Path(sys.prefix, "lib").glob("libmpi.so.[0-9]*"))
    env = {"CUPY_COLL_PYTHON": str(environment), **({"MPI4PY_LIBMPI": str(own[0])} if own else {})}
    result = launch("-n", "2", hello, env=env)
    assert result.status == 1, result.output
    assert "mpiexec is Open MPI's, but mpi4py has loaded " in result.output
    assert "use the mpiexec of that one, or let mpi4py load Open MPI: MPI4PY_LIBMPI=" in result.output
    assert result.output.count("\n") == 1, "nothing has been started"


def test_mpiexec_of_another_mpi(environment: Path, hello: str) -> None:
    """It starts so many worlds of one rank; the script does not run."""
    script_file(
        environment.parent / "mpiexec",
        '#!/bin/sh\n[ "$1" = --version ] && echo HYDRA build details: && exit\nshift 2\n"$@" && "$@"\n',
    )
    env = {"CUPY_COLL_PYTHON": str(environment)}
    own = sorted(Path(sys.prefix, "lib").glob("libmpi.so.[0-9]*"))
    if own:  # mpi4py looks for it in its own environment, else in the system
        env["MPI4PY_LIBMPI"] = str(own[0])
    result = launch("-n", "2", hello, env=env)
    assert result.status == 1
    assert "asked for 2 ranks but MPI counts 1" in result.output
    assert "hello" not in result.output


# --- Making .venv ----------------------------------------------------------------------------------------------------

PIP = """
import os, sys, time
with open(os.environ["PIP_CALLS"], "a") as file:
    print(*sys.argv[1:], file=file)
time.sleep(0.1)
print("  Downloading thing-1.0.whl (3 MB)", flush=True)
sys.exit("no such thing as a package" if os.environ.get("PIP_FAILS") else 0)
"""


class Clone:
    """A copy of what set-up reads, in a folder with a blank in its name, with a stand-in Python to make .venv with."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "my clone"
        self.root.mkdir()
        for name in ("mpi_launch.sh", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.root)
        self.calls = folder / "calls"
        self.python = self.root / ".venv" / "bin" / "python"
        self.stamp = self.root / ".venv" / ".cupy_coll_stamp"
        self.commands = folder / "commands"
        self.hello = script_file(folder / "hello.py", "print('hello')")
        model = folder / "model"
        make_environment(model)
        pip = next(model.glob("lib/python*/site-packages")) / "pip"
        script_file(pip / "__init__.py", "")
        script_file(pip / "__main__.py", PIP)
        script_file(model / "bin" / "mpiexec", "#!/bin/sh\necho HYDRA build details:")
        base = getattr(sys, "_base_executable", sys.executable)
        script_file(
            self.commands / "python3",
            f"""#!/bin/sh
case "$1" in
-I) exit 1 ;; # no project here
-m) cp -r '{model}' "$3" ;;
*) exec '{base}' "$@" ;;
esac
""",
        )
        self.smi("exit 9")

    def smi(self, text: str) -> None:
        script_file(self.commands / "nvidia-smi", f"#!/bin/sh\n{text}\n")

    def environment(self, **extra: str) -> dict[str, str]:
        path = f"{self.commands}:{os.environ['PATH']}"
        return {
            "CUPY_COLL_PYTHON": "",
            "VIRTUAL_ENV": "",
            "CONDA_PREFIX": "",
            "PATH": path,
            "PIP_CALLS": str(self.calls),
            **extra,
        }

    def launch(self, *words: str, **extra: str) -> Finished:
        return run_command([str(self.root / "mpi_launch.sh"), *words], LIMIT, self.environment(**extra))

    def pip_calls(self) -> list[str]:
        """What pip was last asked for, without its options."""
        calls = self.calls.read_text().splitlines() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return [call.split()[-1] for call in calls]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_set_up_once(clone: Clone) -> None:
    """Made on first use, saying so; then used; more is added when the tests ask for it, and stays."""
    first = clone.launch("--setup")
    assert first.status == 0, first.output
    assert "making " in first.output
    assert "Downloading thing-1.0.whl (3 MB)" in first.output
    assert first.output.endswith(f"{clone.python}\n")
    assert clone.pip_calls() == ["setuptools", ".[bench,mpi]"]

    assert clone.launch("--setup").output == f"{clone.python}\n"
    assert clone.pip_calls() == []

    assert "adding to " in clone.launch("--setup", "--test").output
    assert clone.pip_calls() == [".[bench,mpi,cuda13,test]"]

    for words in (["--setup"], ["--setup", "--test"]):
        assert clone.launch(*words).output == f"{clone.python}\n"
    assert clone.pip_calls() == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_remade_when_files_change(name: str, clone: Clone) -> None:
    clone.launch("--setup", "--test")
    clone.pip_calls()
    with (clone.root / name).open("a") as file:
        file.write("# changed\n")
    dry = clone.launch("--dry-run", str(clone.hello))
    assert "would first set up" in dry.output
    assert clone.pip_calls() == []
    assert "remaking " in clone.launch("--setup").output
    assert clone.pip_calls() == ["setuptools", ".[bench,mpi]"]


def test_failed_set_up(clone: Clone) -> None:
    """Says what pip said, and where the rest is; the next call starts again."""
    failed = clone.launch("--setup", PIP_FAILS="1")
    assert failed.status == 1
    assert "no such thing as a package" in failed.output
    assert str(clone.root / ".venv.log") in failed.output
    assert not clone.stamp.exists()
    assert "remaking " in clone.launch("--setup").output

    failed = clone.launch("--setup", "--test", PIP_FAILS="1")
    assert failed.status == 1
    assert not clone.stamp.exists()
    assert "remaking " in clone.launch("--setup").output


def test_two_at_once(clone: Clone) -> None:
    """The second waits for the first, and then has nothing to do."""
    command = [str(clone.root / "mpi_launch.sh"), "--setup"]
    env = clean_environment(clone.environment())
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) for _ in "12"
    ]
    outputs = [process.communicate(timeout=LIMIT)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sorted("making " in output for output in outputs) == [False, True]
    assert not any("making " in output and "waiting for another" in output for output in outputs)
    assert clone.pip_calls() == ["setuptools", ".[bench,mpi]"]


def test_not_remade_under_a_job(clone: Clone) -> None:
    clone.launch("--setup")
    with (clone.root / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    with (clone.root / ".venv.use").open("a") as file:
        subprocess.run(["flock", "-s", str(file.fileno())], pass_fds=[file.fileno()], check=True)
        result = clone.launch("--setup")
    assert result.status == 1
    assert "a job still runs from it" in result.output
    assert clone.launch("--setup").status == 0


def test_moved_clone(clone: Clone) -> None:
    """An environment knows its own path: where the folder was renamed it is made again."""
    clone.launch("--setup")
    clone.pip_calls()
    clone.root = clone.root.rename(clone.root.parent / "moved")
    assert "remaking " in clone.launch("--setup").output


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("| NVIDIA-SMI 550.54   Driver Version: 550.54   CUDA Version: 12.4 |", "cuda12"),
        ("| NVIDIA-SMI 580.65   Driver Version: 580.65   CUDA Version: 13.0 |", "cuda13"),
        ("CUDA UMD Version : 14.1", "cuda13"),
        ("| Driver Version: 470.1   CUDA Version: 11.4 |", None),
    ],
)
def test_cupy_as_the_gpu_asks(text: str, cuda: str | None, clone: Clone) -> None:
    clone.smi(f"[ \"$1\" = -L ] && printf 'GPU 0: A\\n  MIG 1g\\nGPU 1: B\\n' || echo '{text}'")
    result = clone.launch("--dry-run", str(clone.hello), CUDA_VISIBLE_DEVICES="1,2,3")
    extras = "bench, mpi" + (f", {cuda}" if cuda else "")
    assert result.output.splitlines()[0].endswith(f"would first set up {clone.root}/.venv, for: {extras}")
    assert " -n 3 " in result.output


def test_one_rank_a_gpu(clone: Clone) -> None:
    clone.smi("printf 'GPU 0: A\\n  MIG 1g\\nGPU 1: B\\n'")
    command = [str(clone.root / "mpi_launch.sh"), "--dry-run", str(clone.hello)]
    env = {name: value for name, value in clone.environment().items() if name != "CUDA_VISIBLE_DEVICES"}
    assert " -n 2 " in run_command(["env", "-u", "CUDA_VISIBLE_DEVICES", *command], LIMIT, env).output


def test_other_cupy_remakes(clone: Clone) -> None:
    """The two CuPys share their files. Without a GPU, as on a cluster's front end, the tests take either."""
    clone.smi("echo CUDA Version: 12.4")
    clone.launch("--setup")
    assert clone.pip_calls()[-1] == ".[bench,mpi,cuda12]"
    clone.smi("exit 9")
    assert "adding to " in clone.launch("--setup", "--test").output
    assert clone.pip_calls()[-1] == ".[bench,mpi,cuda12,test]"
    clone.smi("echo CUDA Version: 13.0")
    assert "remaking " in clone.launch("--setup").output
    assert clone.pip_calls()[-1] == ".[bench,mpi,test,cuda13]"


def test_no_python(clone: Clone) -> None:
    """Commands that are there and refuse, as a version manager's do, do not count."""
    for name in ("python3", "python3.14", "python3.13", "python3.12", "python3.11", "python"):
        script_file(clone.commands / name, "#!/bin/sh\necho no such version; exit 127")
    result = clone.launch("--setup")
    assert result.status == 1
    assert "needs Python 3.11 or newer with its venv module" in result.output


def test_user_environment_is_not_installed_into(tmp_path: Path) -> None:
    """What the tests need and it lacks is named, with the command that installs it."""
    python = tmp_path / "environment" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(python.parents[1])], check=True, timeout=LIMIT)
    site = next(python.parents[1].glob("lib/python*/site-packages"))
    for package in ("cupy_coll", "mpi4py"):
        (site / package).mkdir()
    env = {"CUPY_COLL_PYTHON": str(python)}
    assert launch("--setup", env=env).output == f"{python}\n"
    result = launch("--setup", "--test", env=env)
    assert result.status == 1
    missing = f"{python} lacks pytest xdist hypothesis setuptools cupy"
    assert f"{missing}. Install them with: {python} -m pip" in result.output


# --- Running the tests -----------------------------------------------------------------------------------------------


@pytest.fixture
def suite(clone: Clone) -> Clone:
    """A clone whose pytest is a stand-in: without ranks it ends with $ALONE, on N ranks with $ON_N (default 0)."""
    launcher = clone.root / "mpi_launch.sh"
    launcher.write_text(launcher.read_text().replace("PART_LIMIT=900", "PART_LIMIT=2"))
    clone.launch("--setup", "--test")
    site = next((clone.root / ".venv").glob("lib/python*/site-packages"))
    script_file(site / "pytest" / "__init__.py", "")
    script_file(site / "pytest" / "__main__.py", "import os, sys\nsys.exit(int(os.environ.get('ALONE', 0)))")
    script_file(
        clone.python.parent / "mpiexec",
        """#!/bin/sh
[ "$1" = --version ] && echo HYDRA build details: && exit
eval "how=\\${ON_$2:-0}"
[ "$how" != hang ] || exec sleep 30
exit "$how"
""",
    )
    return clone


def outcomes(result: Finished) -> list[str]:
    """What the closing lines say of the parts and of the whole."""
    return [line.split(" s  ")[1] for line in result.output.splitlines()[-11:]]


def test_every_part_runs(suite: Clone) -> None:
    """Also after one that failed, or did not end within its limit; the status tells."""
    assert outcomes(suite.launch("--test")) == ["passed"] * 11
    result = suite.launch("--test", ALONE="1", ON_2="hang", ON_3="9")
    assert result.status == 1
    alone, jobs, *parts, total = outcomes(result)
    assert (alone, jobs, total) == ("failed with status 1", "failed with status 1", "failed")
    assert parts[:2] + parts[6:] == ["passed"] * 4
    assert all(part.startswith("ended after ") for part in parts[2:4])
    assert parts[4:6] == ["failed with status 9"] * 2


def test_part_without_tests(suite: Clone) -> None:
    """No test in a part is a failure, unless the user chose the tests."""
    assert suite.launch("--test", ON_4="5").status == 1
    result = suite.launch("--test", "-k", "something", ON_4="5")
    assert (result.status, outcomes(result)) == (0, ["passed"] * 11)


def test_files_of_killed_jobs_are_removed(hello: str) -> None:
    """One's own of MPICH in /dev/shm that nobody maps; not those in use, not new ones, nobody else's files."""
    shm = Path("/dev/shm")
    names = ["mpich_shm_test_stale", "mpich_shm_test_used", "mpich_shm_test_new", "other_test_stale"]
    files = {name: shm / f"{name}_{os.getpid()}" for name in names}
    try:
        for name, file in files.items():
            file.write_bytes(bytes(4096))
            if not name.endswith("new"):
                os.utime(file, (time.time() - 300,) * 2)
        with open(files["mpich_shm_test_used"], "r+b") as used, mmap.mmap(used.fileno(), 4096):
            ended = launch("-n", "1", hello)
        assert ended.status == 0, ended.output
        assert [name for name, file in files.items() if file.exists()] == names[1:]
    finally:
        for file in files.values():
            file.unlink(missing_ok=True)
