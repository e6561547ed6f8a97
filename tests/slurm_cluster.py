"""Slurm for tests: daemons in a folder of their own, on one machine or two, that end with them."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import machines
import pytest
from jobs import free_port

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo", "srun", "sbatch", "scancel", "squeue")
# slurmd may have fewer cores than it says. Tasks run on all of them.
_CONF = """
ClusterName=test
SlurmctldHost={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={controller_port}
SlurmdPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
ReturnToService=2
FirstJobId={first_job}
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_START_SECONDS, _END_SECONDS = 30, 30


def why_not() -> str | None:
    """The reason why there can be no cluster here, if there is one."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        packages = "slurmctld slurmd slurm-client munge"
        return f"Slurm is not installed ({', '.join(missing)}): apt-get install {packages}"
    return None


class Cluster:
    """Slurm's commands, given to a cluster of these tests'.

    Args:
        folder: Where its files are; every machine can read it.
        before: What to put before a command that runs on the first machine.
        num_machines: How many it has.
    """

    def __init__(self, folder: Path, before: Sequence[str], num_machines: int) -> None:
        self.folder, self._before, self.num_machines = folder, list(before), num_machines

    def run(self, *command: Any, seconds: float = 120, **variables: str) -> Any:
        """Run a command of Slurm's to its end; `variables` are of its environment."""
        return subprocess.run(
            [*self._before, *map(str, command)],
            cwd=self.folder,
            env=self._environment() | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def _environment(self) -> dict[str, str]:
        ours = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "SBATCH", "SRUN"))
        }
        return ours | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _path()}


@contextlib.contextmanager
def one_machine() -> Iterator[Cluster]:
    """A cluster of one machine, which is called localhost."""
    with _folder() as folder, _running(folder, {"localhost": []}, "localhost") as cluster:
        yield cluster


@contextlib.contextmanager
def two_machines() -> Iterator[Cluster]:
    """A cluster of two machines, node1 and node2, with a cable between them.

    Each calls itself 127.0.1.1, as machines with Debian do.
    """
    with machines.two_machines() as (inside, _), _folder() as folder:
        names = ("node1", "node2")
        nodes = {}
        for name, into in zip(names, inside, strict=True):
            known = ["127.0.0.1 localhost", f"127.0.1.1 {name}"]
            known += [
                f"{a} {n}" for a, n in zip(machines.ADDRESSES, names, strict=True) if n != name
            ]
            hosts = folder / f"hosts.{name}"
            hosts.write_text("\n".join(known) + "\n")
            begin = f'mount --bind {hosts} /etc/hosts && hostname {name} && exec "$@"'
            nodes[name] = [*into, "unshare", "--mount", "--uts", "sh", "-c", begin, "sh"]
        with _running(folder, nodes, f"node1({machines.ADDRESSES[0]})") as cluster:
            yield cluster


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))
    try:
        folder.chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _running(folder: Path, nodes: dict[str, list[str]], controller: str) -> Iterator[Cluster]:
    (folder / "state").mkdir()
    key = folder / "key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    addresses = dict(zip(nodes, machines.ADDRESSES, strict=False)) if len(nodes) > 1 else {}
    lines = []
    for name in nodes:
        (folder / f"spool.{name}").mkdir()
        where = f" NodeAddr={addresses[name]}" if addresses else ""
        lines.append(f"NodeName={name}{where} CPUs=8 State=UNKNOWN")
    conf, user = folder / "slurm.conf", pwd.getpwuid(os.getuid()).pw_name
    conf.write_text(
        _CONF.format(
            folder=folder,
            controller=controller,
            user=user,
            controller_port=free_port(),
            port=free_port(),
            first_job=1 + secrets.randbelow(4096),  # JAX takes its port from the number
            nodes="\n".join(lines),
        )
    )
    first = next(iter(nodes.values()))
    files = {"socket": "munge.socket", "key-file": "key", "pid-file": "munge.pid"}
    files |= {"seed-file": "munge.seed", "log-file": "munge.log"}
    places = [f"--{name}={folder / file}" for name, file in files.items()]
    with contextlib.ExitStack() as daemons:
        daemons.enter_context(_daemon(folder, "munged", "--foreground", *places))
        _wait(lambda: (folder / "munge.socket").exists(), folder)
        daemons.enter_context(_daemon(folder, *first, "slurmctld", "-D", "-c", "-f", conf))
        for name, inside in nodes.items():
            begin = (*inside, "slurmd", "-D", "-N", name, "-f", conf)
            daemons.enter_context(_daemon(folder, *begin))
        cluster = Cluster(folder, first, len(nodes))

        def idle() -> bool:
            found = cluster.run("sinfo", "--noheader", "--format=%n %t").stdout.split("\n")
            return found[:-1] == [f"{name} idle" for name in nodes]

        _wait(idle, folder)
        try:
            yield cluster
        finally:  # tasks would outlive the daemons
            cluster.run("scancel", "--full", "--user", user)
            deadline = time.monotonic() + _END_SECONDS
            while cluster.run("squeue", "--noheader").stdout and time.monotonic() < deadline:
                time.sleep(0.1)


@contextlib.contextmanager
def _daemon(folder: Path, *command: Any) -> Iterator[None]:
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=folder,
            env=os.environ | {"PATH": _path()},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(ready: Any, folder: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not ready():
        if time.monotonic() > deadline:
            pytest.skip(f"Slurm does not start here: {(folder / 'log').read_text()[-500:]}")
        time.sleep(0.1)


def _path() -> str:
    """Daemons are in folders that are not in everybody's path."""
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
