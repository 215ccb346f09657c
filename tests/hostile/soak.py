"""`python -m tests.hostile.soak --minutes 30`: training that is disturbed at random and resumed.

Runs are killed, stopped, short of disk space, and see the clock and the times of their files jump.
Each must end with the weights, the optimizer and the table of an undisturbed run, bit for bit. With
`--write` the counts go to docs/explanation/reliability.md. The disk is a small tmpfs in a mount
namespace of this process; where that is not permitted it is left out, and the counts say so. The
clock is Python's `time.time`.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

import torch  # noqa: E402
from hostile import damages, forked, mounts, page  # noqa: E402
from hostile.runs import FORK, is_same, outcome  # noqa: E402
from train import little, scenes  # noqa: E402

from irpe.cli.main import main as main_of_irpe  # noqa: E402
from irpe.progress import silent  # noqa: E402
from irpe.train.config import make_task  # noqa: E402

DISK_BYTES = 320 << 20  # twice the checkpoint of the detector, and more
BOUND = 300.0  # seconds in which a run ends that was asked to, on a machine with other work
FILES = {"run.json", "checkpoint.pt", "metrics.csv", ".lock", "model/irpe.json"}
FILES |= {"model/model.safetensors"}
KILL, STOP, FULL, CLOCK, TIMES = "SIGKILL", "SIGTERM", "full disk", "clock", "file times"


class Soak:
    """Disturbs runs.

    Args:
        folder: An empty folder.
        seed: Of the moments and kinds of the disturbances.
        has_disk: Whether a file system of its own may be mounted in the folder.
    """

    def __init__(self, folder, seed, has_disk):
        self.folder, self.random, self.counts = folder, random.Random(seed), Counter()
        self.disk, self.failures, self.expected = folder / "disk", [], {}
        self.disk.mkdir()
        if has_disk:
            mounts.mount_tmpfs(self.disk, DISK_BYTES)
        boxes, images = scenes.make_scenes(folder / "scenes"), folder / "images"
        for split, count in (("train", 96), ("val", 16)):
            damages.save_pictures(images / split, "png", count)
        classifier = little.AUGMENTED.replace(data=str(images), channels=3, epochs=4)
        detector = scenes.CONFIG.replace(data=str(boxes), epochs=3)
        configs = [classifier, detector, classifier.replace(workers=1)]
        self.configs = []
        for config in configs:
            task = make_task(config)
            task.open("train", None, silent)  # which fills in the classes
            self.configs.append(task.config)
        self.kinds = [KILL, STOP, CLOCK, TIMES, *[FULL] * has_disk]
        self.clock = folder / "clock"
        self.clock.write_text("0")

    def start(self, directory):
        """Starts a run where it stands, in a process that is forked: loading takes long."""
        self.counts["starts"] += 1
        process = FORK.Process(target=self._become, args=[directory])
        process.start()
        return process

    def _become(self, directory):
        now, clock = time.time, self.clock
        time.time = lambda: now() + float(clock.read_text() or 0)
        time.time_ns = lambda: int(1e9 * time.time())
        forked.become(main_of_irpe, ["train", "--resume", str(directory)], self.disk, 0)

    def round(self, number, until):
        """Trains a configuration undisturbed, once, and then disturbed; compares the two."""
        index = number % len(self.configs)
        if index not in self.expected:
            undisturbed = self.train(index, f"undisturbed-{index}", 0.0)
            self.expected[index] = None if self.failures else outcome(undisturbed)
            shutil.rmtree(undisturbed)
        directory = self.train(index, f"disturbed-{number}", until)
        if self.failures:
            return
        if not is_same(outcome(directory), self.expected[index]):
            self.failures.append(f"round {number} ended with another result")
        files = {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}
        left = {name for name in files if not name.startswith("tensorboard/")} - FILES
        if left:
            self.failures.append(f"round {number} left {sorted(left)}")
        shutil.rmtree(directory)
        self.counts["runs"] += 1

    def train(self, index, name, until):
        """Trains to the end and returns the directory; disturbs it until a moment."""
        directory = self.disk / name
        directory.mkdir()
        (directory / "run.json").write_text(self.configs[index].with_absolute_paths().to_json())
        code = None
        while code != 0 and not self.failures:
            process, done = self.start(directory), set()
            while process.is_alive() and time.monotonic() < until:
                self._wait(process, self.random.uniform(0, 4))
                if process.is_alive() and time.monotonic() < until:
                    done.add(self.disturb(process, directory))
            code = self._end(process, done)
        return directory

    def disturb(self, process, directory):
        """Disturbs a run in a random way, and returns which."""
        kind = self.random.choice(self.kinds)
        self.counts[kind] += 1
        seconds = self.random.choice([1, 3600, 86400 * 400]) * self.random.uniform(-1, 1)
        if kind in (KILL, STOP):
            os.kill(process.pid, getattr(signal, kind))
            self._wait(process, BOUND)
        elif kind == CLOCK:
            self.clock.write_text(f"{seconds:+.3f}")
        elif kind == TIMES:
            for path in directory.rglob("*"):
                if path.exists():
                    moment = time.time() + seconds
                    os.utime(path, (moment, moment))
        else:
            self._fill(process)
        return kind

    def _fill(self, process):
        """Leaves little space, or none, for some time."""
        ballast, left = self.disk / "ballast", self.random.choice([0, 8192, 65536, 262144])
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            file.write(bytes(max(0, shutil.disk_usage(self.disk).free - left)))
        self._wait(process, self.random.uniform(0, 8))
        ballast.unlink()

    def _wait(self, process, seconds):
        process.join(seconds)
        if seconds == BOUND and process.is_alive():
            self.failures.append("a run that was asked to end did not")
            process.kill()
            process.join()

    def _end(self, process, done):
        """Returns how a run ended, once it has, and notes what should not be."""
        process.join()
        said, code = (self.folder / "stderr").read_text(errors="replace"), process.exitcode
        expected = {0}
        expected |= {-signal.SIGKILL} if KILL in done else set()
        expected |= {143, -signal.SIGTERM} if STOP in done else set()
        expected |= {1} if FULL in done else set()
        errors = [line for line in said.splitlines() if line.startswith("irpe: ")]
        if code not in expected or "Traceback" in said or len(errors) != (code == 1):
            self.failures.append(f"exit {code} after {sorted(done)}: {said[-2000:]}")
        return code

    def rows(self, minutes):
        """Returns the counts as the lines of a table."""
        lines = ["| what | count |", "| --- | ---: |", f"| minutes | {minutes:g} |"]
        for name in ("runs", "starts", KILL, STOP, FULL, CLOCK, TIMES):
            is_left_out = name == FULL and FULL not in self.kinds
            lines.append(f"| {name} | {'not permitted' if is_left_out else self.counts[name]} |")
        return [*lines, f"| failures | {len(self.failures)} |"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write the counts to the docs")
    given = parser.parse_args()
    torch.set_num_threads(1)
    has_disk = mounts.enter_namespace()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as mounted:
        soak = Soak(Path(folder), given.seed, has_disk)
        mounted.callback(mounts.unmount, soak.disk)
        until, number = time.monotonic() + 60 * given.minutes, 0
        while time.monotonic() < until and not soak.failures:
            soak.round(number, until)
            number += 1
            print(f"round {number}:", dict(soak.counts), *soak.failures, flush=True)
    lines = soak.rows(given.minutes)
    print(*lines, *soak.failures, sep="\n")
    if given.write:
        page.replace("soak", lines)
    sys.exit(bool(soak.failures))


if __name__ == "__main__":
    main()
