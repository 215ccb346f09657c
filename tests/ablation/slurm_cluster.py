"""A SLURM of two nodes on this machine: munge, controller and daemons, with accounting or without.

Every process is started here, in the foreground, and ended by its id. It needs root and Debian's
packages slurm-wlm, and slurmdbd and mariadb-server for the accounting.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol")
FOR_ACCOUNTING = ("slurmdbd", "mariadbd", "mariadb-install-db", "mariadb", "sacct")
NODES = ("n1", "n2")
_SECONDS = 60

_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
KillWait=5
SlurmdTimeout=30
InactiveLimit=0
MinJobAge={age}
{accounting}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=1 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=1 RealMemory=1000
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
_ACCOUNTING = """AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={database_daemon}
AccountingStoragePass={folder}/munge.socket
JobAcctGatherType=jobacct_gather/none"""
_DATABASE_DAEMON = """
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={database_daemon}
SlurmUser=root
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm
"""


def missing_parts(*, has_accounting: bool) -> str:
    """Returns what keeps this machine from running SLURM, in words; nothing if all is there."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    programs = (*NEEDED, *(FOR_ACCOUNTING if has_accounting else ()))
    lacking = [name for name in programs if shutil.which(name, path=path) is None]
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        lacking.append("root")
    return f"needs {', '.join(lacking)}" if lacking else ""


class SlurmCluster:
    """SLURM on two nodes of one processor each, while in a `with` block.

    Args:
        folder: Where its files are.
        has_accounting: Whether there is a database, so that `sacct` answers.
        age: Seconds until the controller forgets a job that has ended.
    """

    def __init__(self, folder: Path, *, has_accounting: bool, age: int = 36000) -> None:
        self.folder, self.has_accounting, self.age = folder, has_accounting, age
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.stack = ExitStack()

    def __enter__(self) -> "SlurmCluster":
        with self.stack:
            self._start_all()
            self.stack = self.stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def _start_all(self) -> None:
        self.folder.mkdir(parents=True)
        self.folder.chmod(0o755)
        (self.folder / "state").mkdir()
        names = ("controller", "first", "second", "database", "database_daemon")
        ports = dict(zip(names, _free_ports(len(names)), strict=True))
        self.values = {"folder": self.folder, "host": socket.gethostname().split(".")[0], **ports}
        accounting = _ACCOUNTING.format(**self.values) if self.has_accounting else ""
        (self.folder / "slurm.conf").write_text(
            _CONF.format(**self.values, accounting=accounting, age=self.age)
        )
        before = {name: os.environ.get(name) for name in ("SLURM_CONF", "PATH")}
        self.stack.callback(_restore, before)
        os.environ["SLURM_CONF"] = str(self.folder / "slurm.conf")
        os.environ["PATH"] += ":/usr/sbin:/sbin"
        self.stack.callback(self._end_steps)  # last of all
        self._start_munge()
        if self.has_accounting:
            self._start_accounting()
        self.start_controller()
        for node in NODES:
            (self.folder / f"spool-{node}").mkdir()
            self.start(node, "slurmd", "-D", "-N", node)
        _wait(lambda: ask("sinfo", "-h", "-o", "%D %t") == "2 idle", "the nodes are not idle")
        self.stack.callback(self._end_jobs)

    def _end_jobs(self) -> None:
        """Cancels what still runs, so that no step outlives the cluster."""
        ask("scancel", "--me")
        _wait(lambda: not ask("squeue", "-h"), "jobs do not end")

    def _end_steps(self) -> None:
        """Ends the daemons of steps that nobody is left to take leave of."""
        mark = f"SLURM_CONF={self.folder}/".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_step = (process / "comm").read_text() == "slurmstepd\n"
                if is_step and mark in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)

    def start(self, name: str, *command: str) -> None:
        """Starts a process of the cluster."""
        with open(self.folder / f"{name}.output", "ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        self.running[name] = process
        self.stack.callback(self.end, name)

    def end(self, name: str) -> None:
        """Ends a process of the cluster, if it runs."""
        process = self.running.pop(name, None)
        if process is not None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start_controller(self) -> None:
        """Starts the controller, or starts it again with the state that it had."""
        self.start("slurmctld", "slurmctld", "-D")
        _wait(lambda: "UP" in ask("scontrol", "ping"), "the controller does not answer")

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = [
            f"--{kind}-file={self.folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")
        ]
        socket_file = f"--socket={self.folder}/munge.socket"
        self.start("munged", "munged", "--foreground", "--force", socket_file, *files)
        _wait((self.folder / "munge.socket").exists, "munge has no socket")

    def _start_accounting(self) -> None:
        data, file = self.folder / "mysql", f"--socket={self.folder}/mysql.socket"
        options = ["--no-defaults", "--user=root", f"--datadir={data}"]
        install = ["mariadb-install-db", *options, "--auth-root-authentication-method=normal"]
        subprocess.run(install, check=True, capture_output=True)
        ports = ["--bind-address=127.0.0.1", f"--port={self.values['database']}"]
        files = [file, f"--pid-file={self.folder}/mysql.pid"]
        self.start("mariadbd", "mariadbd", *options, *ports, *files)
        make = (
            "create database slurm; create user slurm@'127.0.0.1' identified by 'slurm'; "
            "create user slurm@localhost identified by 'slurm'; "
            "grant all on slurm.* to slurm@'127.0.0.1'; grant all on slurm.* to slurm@localhost;"
        )
        client = ["mariadb", "--no-defaults", "--user=root", file]
        _wait(lambda: _works(*client, "-e", "select 1"), "the database does not answer")
        subprocess.run([*client, "-e", make], check=True, capture_output=True)
        conf = self.folder / "slurmdbd.conf"
        conf.write_text(_DATABASE_DAEMON.format(**self.values))
        conf.chmod(0o600)
        self.start("slurmdbd", "slurmdbd", "-D")
        _wait(lambda: _works("sacctmgr", "-n", "show", "cluster"), "slurmdbd does not answer")
        subprocess.run(["sacctmgr", "-i", "add", "cluster", "test"], capture_output=True)


def ask(*command: str) -> str:
    """Returns what a command of SLURM prints."""
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def _works(*command: str) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


def _wait(condition, message: str) -> None:
    end = time.monotonic() + _SECONDS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(message)
        time.sleep(0.3)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _restore(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
