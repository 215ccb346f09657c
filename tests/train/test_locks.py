"""A run has its directory to itself, and only as long as it lives."""

import errno
import fcntl
import os
import signal
import subprocess

import pytest
from train.processes import start

from irpe.train.run import lock_run

HOLD = """
import sys, time
from pathlib import Path
from irpe.train.run import lock_run
with lock_run(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    process = start("-c", HOLD, tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.communicate()


def test_a_lock_is_refused_to_others_and_dies_with_its_process(tmp_path, holder):
    message = rf"is in use by a run that is alive \(process {holder.pid} on .*choose another --outp"
    with pytest.raises(ValueError, match=message), lock_run(tmp_path):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    for _ in range(2):
        with lock_run(tmp_path):
            pass


def test_a_process_does_not_lock_twice(tmp_path):
    with (
        lock_run(tmp_path),
        pytest.raises(ValueError, match=r"alive \(this process\)"),
        lock_run(tmp_path / "."),
    ):
        pass
    with lock_run(tmp_path):
        pass


FORK = HOLD.replace("    print", "    if os.fork() == 0:\n        time.sleep(60)\n    print")


def test_a_forked_worker_that_outlives_its_run_does_not_hold_the_lock(tmp_path):
    process = start("-c", f"import os{FORK}", tmp_path, stdout=subprocess.PIPE, text=True,
                    start_new_session=True)  # fmt: skip
    try:
        assert process.stdout.readline() == "locked\n"
        process.kill()
        process.wait()
        with lock_run(tmp_path):
            pass
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()


def test_a_file_system_without_locks_gives_a_warning(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with pytest.warns(UserWarning, match="No locks available.*no second run"), lock_run(tmp_path):
        pass
