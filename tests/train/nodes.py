"""Two nodes on one machine: network namespaces that are joined by a veth pair."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

from train.processes import ENVIRONMENT

ADDRESSES = ("192.0.2.1", "192.0.2.2")  # reserved for documentation: never routed
PORT = "29400"


def ip(*arguments):
    """Runs iproute2 and returns whether it did what it was asked."""
    return subprocess.run(["ip", *arguments], capture_output=True).returncode == 0


class Nodes:
    """Two network namespaces with a cable between them; `close` removes both.

    Nothing but the other node can be reached from a node.
    """

    def __init__(self):
        self.names = [f"irpe-{os.getpid()}-{index}" for index in range(2)]
        self.links = [f"irpe{os.getpid() % 10**6}.{index}" for index in range(2)]
        self.started = []

    def open(self):
        """Makes the nodes; returns why that is not possible, or nothing."""
        if shutil.which("ip") is None:
            return "ip (iproute2) is not installed"
        first, second = self.links
        commands = [["netns", "add", name] for name in self.names]
        commands.append(["link", "add", first, "netns", self.names[0], "type", "veth",
                         "peer", "name", second, "netns", self.names[1]])  # fmt: skip
        for name, link, address in zip(self.names, self.links, ADDRESSES, strict=True):
            commands.append(["-n", name, "address", "add", f"{address}/30", "dev", link])
            commands += [["-n", name, "link", "set", each, "up"] for each in (link, "lo")]
        refused = next((command for command in commands if not ip(*command)), None)
        return refused and f"not permitted: ip {' '.join(refused)}"

    def cut(self):
        """Cuts the cable: packets are lost, nobody is told."""
        assert ip("-n", self.names[0], "link", "set", self.links[0], "down")

    def mend(self):
        """Joins the nodes again."""
        assert ip("-n", self.names[0], "link", "set", self.links[0], "up")

    def start(self, index, log, *arguments, **environment):
        """Starts torchrun on a node, with one process there; what it says goes to a file."""
        command = ["ip", "netns", "exec", self.names[index], sys.executable]
        command += ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
        command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{ADDRESSES[0]}:{PORT}"]
        command += ["--rdzv_conf", f"is_host={int(index == 0)}", "--local_addr", ADDRESSES[index]]
        interface = {"GLOO_SOCKET_IFNAME": self.links[index]}
        with log.open("w") as file:
            process = subprocess.Popen(
                [*command, *map(str, arguments)], stdout=file, stderr=file,
                env={**ENVIRONMENT, **interface, **environment}, start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def count_processes(self, index):
        """Returns how many processes run on a node."""
        return len(self._processes(index))

    def kill(self, index):
        """Kills everything that runs on a node, as a power cut does."""
        for process in self._processes(index):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _processes(self, index):
        command = ["ip", "netns", "pids", self.names[index]]
        return [int(line) for line in subprocess.run(command, capture_output=True).stdout.split()]

    def close(self):
        """Ends what runs on the nodes and removes them."""
        for index in range(2):
            self.kill(index)
        for process in self.started:
            process.wait()
        for name in self.names:
            ip("netns", "delete", name)
