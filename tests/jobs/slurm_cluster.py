"""A Slurm of one or two made-up nodes, each with 32 CPUs and 4 GPUs that are only said to be there."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hosts import Hosts, HostsError, wait_for
from starting import Finished, run_command

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sinfo", "scontrol", "scancel")
PACKAGES = "slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins"
START = 40.0  # seconds for the daemons
CPUS, GPUS = 32, 4

CONFIGURATION = """
ClusterName=made_up
SlurmctldHost=node1(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
KillWait=5
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
GresTypes=gpu
NodeName=node[1-{count}] NodeAddr=10.77.0.[1-{count}] CPUs={cpus} Gres=gpu:{gpus}
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=YES
"""


def missing() -> str:
    """Why there can be no Slurm; empty where there can."""
    absent = [name for name in COMMANDS if shutil.which(name) is None]
    return f"no {', '.join(absent)}; Debian: apt-get install {PACKAGES}" if absent else ""


class SlurmCluster:
    """Up when it is made; ``close`` ends all of it."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self.hosts = Hosts(folder, nodes)
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}
        try:
            self._configure(nodes)
            self._start(nodes)
        except (OSError, subprocess.SubprocessError, HostsError):
            self.close()
            raise

    def _configure(self, nodes: int) -> None:
        (self.folder / "state").mkdir()
        for name in self.hosts.names:
            (self.folder / f"spool.{name}").mkdir()
        for number in range(GPUS):
            os.mknod(self.folder / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))  # /dev/null again
        text = CONFIGURATION.format(folder=self.folder, count=nodes, cpus=CPUS, gpus=GPUS)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)

    def _start(self, nodes: int) -> None:
        own = {name: f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "log", "pid", "seed")}
        munge = ["munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *own.values()]
        self.hosts.start(0, munge, self.folder / "munged.out")
        if not wait_for(lambda: (self.folder / "munge.socket").exists(), START):
            raise HostsError(f"munged does not start:\n{self.logs()}")
        self.hosts.start(0, ["slurmctld", "-D", "-c"], self.folder / "slurmctld.out", self.variables)
        for number, name in enumerate(self.hosts.names):
            self.hosts.start(number, ["slurmd", "-D", "-c"], self.folder / f"slurmd.{name}.out", self.variables)
        if not wait_for(lambda: self._idle() == nodes, START):
            raise HostsError(f"Slurm does not start:\n{self.logs()}")

    def _idle(self) -> int:
        """How many nodes are ready."""
        return self._command(["sinfo", "--noheader", "--Node", "--format=%T"]).split().count("idle")

    def sbatch(
        self, script: Path, options: Sequence[str], folder: Path, env: Mapping[str, str], limit: float
    ) -> Finished:
        """Submit ``script`` from ``folder``, where its output goes, and wait for its end; the job's status and seconds.

        Not by ``sbatch --wait``, which looks after 2, 10, 42 and 74 seconds.
        """
        submit = self.hosts.on(0, ["sbatch", "--parsable", *options, str(script)], folder)
        submitted = run_command(submit, START, {**env, **self.variables})
        if submitted.status:
            raise AssertionError(f"{submitted.output}\n{self.logs()}")
        start, job = time.monotonic(), submitted.output.split()[-1]
        state: dict[str, str] = {}

        def has_ended() -> bool:
            shown = run_command(self.hosts.on(0, ["scontrol", "show", "job", job]), START, self.variables)
            state.update(re.findall(r"(\w+)=(\S*)", shown.output))
            return state.get("JobState") not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")

        ended = wait_for(has_ended, limit)
        seconds = time.monotonic() - start
        written = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.out")))
        if not ended or not written:
            self._command(["scancel", job])
            raise AssertionError(f"job {job} is {state} after {seconds:.0f} s\n{written}\n{self.logs()}")
        status, killed_by = map(int, state["ExitCode"].split(":"))
        return Finished(128 + killed_by if killed_by else status, written, seconds)

    def _command(self, words: Sequence[str]) -> str:
        env = {**os.environ, **self.variables}
        done = subprocess.run(
            self.hosts.on(0, words), capture_output=True, text=True, timeout=START, env=env, check=False
        )
        return done.stdout

    def logs(self) -> str:
        """The ends of what the daemons have written."""
        files = sorted({*self.folder.glob("*.log"), *self.folder.glob("*.out"), *self.folder.glob("munge.log")})
        return "".join(f"--- {file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in files)

    def close(self) -> None:
        if (self.folder / "slurmctld.pid").exists():
            self._command(["scancel", "--user=root"])
        self.hosts.close()
