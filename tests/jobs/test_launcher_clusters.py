"""mpi_launch.sh inside schedulers and on several hosts: the command that it would run, with launchers that are made up.

Only what mpiexec starts for real is known to work; the others are tried here for the words that they get.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
from starting import Finished, run_command
from test_launcher import LAUNCHER, environment, hello, script_file  # noqa: F401 (fixtures)

HYDRA, OPEN_MPI = "HYDRA build details:", "mpiexec (Open MPI) 5.0.11"


@pytest.fixture
def cluster(tmp_path: Path, environment: Path, hello: str):  # noqa: F811
    """Runs the launcher dry, with these made-up commands (name: output) and variables; the words up to the Python."""

    def run(*options: str, mpi: str = HYDRA, commands: dict[str, str] | None = None, **variables: str) -> list[str]:
        result = result_of(*options, mpi=mpi, commands=commands, **variables)
        assert result.status == 0, result.output
        words = shlex.split(result.output.splitlines()[-1])
        return words[: words.index(str(environment))]

    def result_of(
        *options: str, mpi: str = HYDRA, commands: dict[str, str] | None = None, **variables: str
    ) -> Finished:
        script_file(environment.parent / "mpiexec", f"#!/bin/sh\necho '{mpi}'")
        for name, output in (commands or {}).items():
            script_file(tmp_path / "commands" / name, f"#!/bin/sh\necho '{output}'")
        path = f"{tmp_path / 'commands'}:{os.environ['PATH']}"
        env = {"CUPY_COLL_PYTHON": str(environment), "PATH": path, "OMP_NUM_THREADS": "", **variables}
        own = sorted(Path(sys.prefix, "lib").glob("libmpi.so.[0-9]*"))
        if own:  # mpi4py looks for it in its own environment, else in the system
            env["MPI4PY_LIBMPI"] = str(own[0])
        return run_command([LAUNCHER, "--dry-run", *options, hello], 40, env)

    run.result_of = result_of
    return run


def after_threads(words: list[str]) -> list[str]:
    """Without OMP_NUM_THREADS, which the ranks choose where the launcher cannot see their nodes."""
    if words[0] != "env":
        return words
    assert words[1].startswith("OMP_NUM_THREADS=")
    return words[2:]


def test_slurm(cluster):
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "6", "SLURM_JOB_NUM_NODES": "2"}
    words = after_threads(cluster(commands={"srun": "MPI plugin types are... none pmi2 pmix"}, **slurm))
    assert words == ["srun", "-K1", "--ntasks=6", "--mpi=pmi2"]
    options = ["-n", "4", "--ppn", "2", "--tag", "--bind", "core"]
    words = after_threads(cluster(*options, commands={"srun": "none pmi2"}, **slurm))
    assert words == ["srun", "-K1", "--ntasks=4", "--mpi=pmi2", "--ntasks-per-node=2", "--cpu-bind=cores", "--label"]
    words = after_threads(cluster("-n", "4", "--launcher", "mpiexec", **slurm))
    assert Path(words[0]).name == "mpiexec"


def test_slurm_cores_of_a_task(cluster):
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "6"}
    words = cluster(commands={"srun": "none pmi2"}, **slurm)
    assert words[:2] == ["env", "OMP_NUM_THREADS=6"]
    assert words[2:] == ["srun", "-K1", "--ntasks=8", "--mpi=pmi2", "--cpus-per-task=6"]


@pytest.mark.parametrize("version", ["PALS 1.2.12", "mpiexec version 1.2.12 with PALS", None])
def test_pals(cluster, tmp_path, environment, version):  # noqa: F811
    """Cray's mpiexec, by its version or, where that is a number only, by its folder."""
    if version is None:
        real = script_file(tmp_path / "pals" / "bin" / "mpiexec", "#!/bin/sh\necho mpiexec version 1.2.12")
        (environment.parent / "mpiexec").symlink_to(real)
    nodes = tmp_path / "nodes"
    nodes.write_text("a\na\nb\nb\n")
    words = after_threads(cluster(mpi=version or "mpiexec version 1.2.12", PBS_NODEFILE=str(nodes)))
    assert words[1:] == ["-n", "4"], "it knows the job's nodes"
    options = ["-n", "4", "--ppn", "2", "--hosts", "a,b", "--bind", "core", "--tag"]
    words = after_threads(cluster(*options, mpi=version or "mpiexec version 1.2.12"))
    assert words[1:] == ["-n", "4", "--ppn", "2", "--hosts", "a,b", "--cpu-bind", "core", "--label"]


@pytest.mark.parametrize(
    ("visible", "ranks"), [("0,1,2", 3), ("0,-1,2", 1), ("-1", None), ("", None), ("GPU-a-1,MIG-b", 2)]
)
def test_visible_gpus(cluster, visible, ranks):
    """One rank a GPU; CUDA reads its list up to a negative number."""
    words = after_threads(cluster(commands={"nvidia-smi": "GPU 0: x"}, CUDA_VISIBLE_DEVICES=visible))
    assert words[2] == str(ranks or min(4, len(os.sched_getaffinity(0))))


def test_slurm_without_the_pmi_of_this_mpi(cluster):
    variables = {"SLURM_JOB_ID": "7"}
    words = after_threads(cluster("-n", "4", commands={"srun": "none pmix_v4"}, **variables))
    assert Path(words[0]).name == "mpiexec", "inside the allocation"
    result = cluster.result_of("-n", "4", "--launcher", "srun", commands={"srun": "none"}, **variables)
    assert result.status == 1
    assert "names no PMI for this MPI" in result.output


def test_pbs(cluster, tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("a\na\nb\nb\n")
    words = after_threads(cluster(PBS_NODEFILE=str(nodes)))
    assert words[1:] == ["-n", "4", "-f", str(nodes)]
    words = after_threads(cluster("--ppn", "2", mpi=OPEN_MPI, PBS_NODEFILE=str(nodes), NCCL_DEBUG="WARN"))
    assert ["--hostfile", str(nodes)] == words[words.index("--hostfile") :][:2]
    assert words[words.index("--map-by") :][:2] == ["--map-by", "ppr:2:node"]
    forwarded = [words[i + 1] for i, word in enumerate(words) if word == "-x"]
    assert {"NCCL_DEBUG", "CUPY_COLL_PYTHON"} <= set(forwarded)
    assert "OMP_NUM_THREADS" not in forwarded, "Open MPI warns of what is not set"
    words = cluster(mpi=OPEN_MPI, PBS_NODEFILE=str(nodes), OMP_NUM_THREADS="3")
    assert words[words.index("OMP_NUM_THREADS") - 1] == "-x"


def test_lsf_and_flux(cluster):
    words = after_threads(cluster("--tag", commands={"jsrun": ""}, LSB_JOBID="3", LSB_DJOB_NUMPROC="8"))
    assert words == ["jsrun", "--np", "8", "--stdio_mode", "prepended"]
    for options in (["--ppn", "4"], ["--hosts", "a,b"], ["--bind", "core"]):
        result = cluster.result_of("-n", "8", *options, commands={"jsrun": ""}, LSB_JOBID="3")
        assert result.status == 2
        assert f"{options[0]} is not passed on to jsrun" in result.output
    words = after_threads(cluster("-n", "8", "--ppn", "4", commands={"flux": ""}, FLUX_URI="local:///x"))
    assert words == ["flux", "run", "-n", "8", "--tasks-per-node=4"]


def test_hosts_threads_and_variables(cluster):
    words = cluster("-n", "4", "--ppn", "2", "--hosts", "a,b", "--bind", "none", "--tag")
    assert words[1:] == ["-n", "4", "-ppn", "2", "-hosts", "a,b", "-bind-to", "none", "-l"]
    words = after_threads(cluster("-n", "4", "--hosts", "a:2,b:2", "--env", "MY_OWN", mpi=OPEN_MPI))
    assert words[words.index("--host") :][:2] == ["--host", "a:2,b:2"]
    assert "MY_OWN" in words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ppn", "0"], "--ppn needs a number of ranks, got '0'"),
        (["--hosts", "a b"], "--hosts needs hosts separated by commas, got 'a b'"),
        (["--hostfile", "/nowhere/at all"], "--hostfile: cannot read '/nowhere/at all'"),
        (["--bind", "socket"], "--bind needs core or none, got 'socket'"),
        (["--env", "A=1"], "--env needs the name of a variable, got 'A=1'"),
        (["--launcher", "aprun"], "--launcher needs mpiexec, srun, jsrun or flux, got 'aprun'"),
    ],
)
def test_wrong_use(words, message):
    result = run_command([LAUNCHER, *words, "script.py"], 40)
    assert result.status == 2
    assert message in result.output


def test_threads_of_the_node_that_a_rank_runs_on(tmp_path):
    """One rank on the first of two made-up hosts, three on the second."""
    script = script_file(tmp_path / "threads.py", "import os; print(os.environ['OMP_NUM_THREADS'] + '\\n', end='')")
    env = {"HYDRA_LAUNCHER": "fork", "OMP_NUM_THREADS": ""}
    result = run_command([LAUNCHER, "-n", "4", "--hosts", "nodeA:1,nodeB:3", str(script)], 60, env)
    assert result.status == 0, result.output
    cores = len(os.sched_getaffinity(0))
    assert sorted(result.output.split()) == sorted([str(cores)] + [str(max(1, cores // 3))] * 3)


@pytest.mark.slow  # test_nodes.py has made-up hosts, too
def test_two_hosts_on_one_machine(tmp_path):
    """hydra's fork launcher takes made-up names for hosts: INTRA_NODE and INTER_NODE are those of two nodes."""
    script = script_file(
        tmp_path / "nodes.py",
        """
import cupy_coll as cc
context = cc.CommContext()
context.init_distributed_env(timeout=60)
intra, inter = context.get_intra_node_process_group(), context.get_inter_node_process_group()
line = f"{context.get_global_rank()} {list(intra.ranks)} {list(inter.ranks)} {context.get_in_node_rank()}"
print(line + "\\n", end="", flush=True)  # one write a line
context.destroy()
""",
    )
    env = {"HYDRA_LAUNCHER": "fork"}
    result = run_command([LAUNCHER, "-n", "4", "--ppn", "2", "--hosts", "nodeA,nodeB", str(script)], 60, env)
    assert result.status == 0, result.output
    assert sorted(line for line in result.output.splitlines() if line[:1].isdigit()) == [
        "0 [0, 1] [0, 2] 0",
        "1 [0, 1] [1, 3] 1",
        "2 [2, 3] [0, 2] 0",
        "3 [2, 3] [1, 3] 1",
    ]
