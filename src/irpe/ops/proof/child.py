"""The process in which a candidate runs for the first time: it may crash, hang or be killed there.

An illegal memory access makes a CUDA context useless until its process ends, so no candidate runs
in the user's process before it has passed here. Tasks and answers are lines of JSON.
"""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import IO, Any

_START = "from irpe.ops.proof.serve import serve; serve()"
_STARTUP_SECONDS = 120.0  # to import torch, on a slow file system too


class ChildLostError(Exception):
    """The process died or did not answer in time; the message says which.

    Args:
        text: What happened.
        is_lasting: Whether that speaks of the task: not if the process could not be started.
    """

    def __init__(self, text: str, is_lasting: bool = True) -> None:
        super().__init__(text)
        self.is_lasting = is_lasting


class Child:
    """A process that proves and times candidates.

    It starts with the first task, and again after one that killed it.

    Args:
        time_limit: Seconds after which a task is given up.
        environment: Variables that the process gets beside those of this one.
    """

    def __init__(self, time_limit: float, environment: Mapping[str, str] | None = None) -> None:
        self._time_limit, self._environment = time_limit, dict(environment or {})
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()

    def __enter__(self) -> "Child":
        """Returns this."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the process."""
        self._end()

    def ask(self, **task: Any) -> dict[str, Any]:
        """Returns the answer to a task: see `serve.Task`.

        Raises:
            ChildLostError: The process died or did not answer in time.
        """
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
            line = self._answers.get(timeout=self._time_limit)
        except queue.Empty:
            self._end()
            raise ChildLostError(f"no answer within {self._time_limit:g} seconds") from None
        except OSError:
            line = ""
        if line:
            return json.loads(line)
        raise ChildLostError(self._why_it_died())

    def _start(self) -> subprocess.Popen[str]:
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": paths, **self._environment}
        command = [sys.executable, "-P", "-W", "ignore", "-c", _START]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
                text=True, env=environment,
            )  # fmt: skip
        except OSError as error:
            raise ChildLostError(f"no process for proofs: {error}", is_lasting=False) from None
        self._process = process
        self._answers = answers = queue.Queue()
        threading.Thread(target=_read, args=(process.stdout, answers), daemon=True).start()
        try:
            is_ready = bool(answers.get(timeout=_STARTUP_SECONDS))
        except queue.Empty:
            is_ready = False
        if not is_ready:
            why = self._why_it_died()
            raise ChildLostError(f"the process for proofs did not start: {why}", is_lasting=False)
        return process

    def _why_it_died(self) -> str:
        """Ends the process and returns how it ended, with the last line that it wrote."""
        process, errors = self._process, self._errors
        assert process is not None
        assert errors is not None
        try:
            status = process.wait(5)
        except subprocess.TimeoutExpired:
            status = 0
        errors.seek(0)
        last = (errors.read().strip().splitlines() or [""])[-1]
        self._end()
        died = status < 0
        how = f"it was ended by signal {-status}" if died else f"it ended with status {status}"
        return f"{how}: {last[-300:]}" if last else how

    def _end(self) -> None:
        streams: list[IO[str] | None] = [self._errors]
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            streams += [self._process.stdin, self._process.stdout]
        for stream in streams:
            with suppress(OSError):  # what was not written yet cannot be: the process is gone
                if stream is not None:
                    stream.close()
        self._process = self._errors = None


def _read(stream: IO[str], answers: "queue.Queue[str]") -> None:
    """Passes the lines of a stream on, then an empty one: it has ended."""
    with suppress(ValueError):  # the stream was closed
        for line in stream:
            answers.put(line)
    answers.put("")
