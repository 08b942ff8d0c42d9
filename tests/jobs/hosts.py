"""Made-up hosts on this machine, by namespaces: each has a name, a network address and a /dev/shm of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

LIMIT = 20.0  # seconds for each command here
DIES_WITH_US = ["setpriv", "--pdeathsig", "KILL"]  # where the tests themselves are killed


class HostsError(Exception):
    """They cannot be made here."""


class Hosts:
    """``node1``, or ``node1`` and ``node2`` joined by a cable. Needs root; nothing is left of them after ``close``."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.names = [f"node{number + 1}" for number in range(count)]
        self.addresses = [f"10.77.0.{number + 1}" for number in range(count)]
        self.keepers: list[subprocess.Popen[str]] = []
        self.children: list[subprocess.Popen[bytes]] = []
        if os.geteuid() != 0:
            raise HostsError("namespaces with addresses of their own need root")
        table = folder / "hosts"
        pairs = zip(self.addresses, self.names, strict=True)
        table.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for address, name in pairs))
        try:
            for name in self.names:
                self._keep(name, table)
            self._connect()
            self._write_ssh()
        except (OSError, subprocess.SubprocessError, HostsError) as error:
            self.close()
            raise HostsError(f"no namespaces here: {error} {getattr(error, 'stderr', '') or ''}") from error

    def _keep(self, name: str, table: Path) -> None:
        """A process that does nothing, in new namespaces, which live as long as it does."""
        steps = (
            f"hostname {name}; mount -t tmpfs tmpfs /dev/shm; mount --bind '{table}' /etc/hosts; ip link set lo up; "
            "echo ready; exec sleep infinity"
        )
        keeper = subprocess.Popen(
            [*DIES_WITH_US, "unshare", "--mount", "--uts", "--net", "sh", "-ec", steps],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.keepers.append(keeper)
        assert keeper.stdout is not None
        said = keeper.stdout.readline()
        if said != "ready\n":
            raise HostsError(said.strip())

    def _connect(self) -> None:
        if len(self.keepers) == 1:  # Open MPI 4 wants a network: a cable from the host to itself
            self.check(0, ["ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth1"])
            self.check(0, ["ip", "link", "set", "eth1", "up"])
        else:
            first, second = (["eth0", "netns", str(keeper.pid)] for keeper in self.keepers)
            cable = ["ip", "link", "add", *first, "type", "veth", "peer", "name", *second]
            subprocess.run(cable, check=True, capture_output=True, text=True, timeout=LIMIT)
        for number, address in enumerate(self.addresses):
            self.check(number, ["ip", "address", "add", f"{address}/24", "dev", "eth0"])
            self.check(number, ["ip", "link", "set", "eth0", "up"])

    def _write_ssh(self) -> None:
        """What launchers take for ssh: options, the host, and words for its shell."""
        self.ssh = self.folder / "ssh"
        cases = "".join(f"{name}) pid={keeper.pid} ;;\n" for name, keeper in zip(self.names, self.keepers, strict=True))
        self.ssh.write_text(
            "#!/bin/sh\n"
            'while [ "${1#-}" != "$1" ]; do shift; done\n'
            f'case $1 in\n{cases}*) echo "no host $1" >&2; exit 255 ;;\nesac\n'
            "shift\n"
            'exec nsenter --target "$pid" --mount --uts --net env -C "$PWD" sh -c "$*"\n'
        )
        self.ssh.chmod(0o755)

    def on(self, number: int, words: Sequence[str], folder: Path | None = None) -> list[str]:
        """The words that run ``words`` on a host, in ``folder``."""
        enter = ["nsenter", "--target", str(self.keepers[number].pid), "--mount", "--uts", "--net"]
        return [*enter, "env", "-C", str(folder or self.folder), *words]

    def check(self, number: int, words: Sequence[str]) -> str:
        """Run on a host; its output."""
        done = subprocess.run(self.on(number, words), check=True, capture_output=True, text=True, timeout=LIMIT)
        return done.stdout

    def start(self, number: int, words: Sequence[str], log: Path, env: dict[str, str] | None = None) -> None:
        """Start what goes on until ``close``."""
        with log.open("ab") as file:
            child = subprocess.Popen(
                [*DIES_WITH_US, *self.on(number, words)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        self.children.append(child)

    def processes(self) -> list[int]:
        """All that runs on the hosts, by their namespaces; the keepers too."""
        mine = {link for keeper in self.keepers if (link := _namespace(keeper.pid))}
        return [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _namespace(pid) in mine]

    def close(self) -> None:
        for end in (signal.SIGTERM, signal.SIGKILL):
            keepers = {keeper.pid for keeper in self.keepers}

            def others(keepers: set[int] = keepers) -> list[int]:
                return [pid for pid in self.processes() if pid not in keepers]

            for pid in others():
                _kill(pid, end)
            wait_for(lambda: not self._reaped() and not others(), 5)
        for keeper in self.keepers:
            keeper.kill()
            keeper.communicate(timeout=LIMIT)
        for child in self.children:
            child.wait(timeout=LIMIT)

    def _reaped(self) -> bool:
        """Whether children still run; those that have ended leave the table of processes."""
        return None in [child.poll() for child in self.children]


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:
        return ""


def _kill(pid: int, end: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, end)
