"""Clusters that cells run on: SLURM, or a scheduler of Dask."""

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from irpe.ablation.cells import Cell, CellResult, read_result
from irpe.ablation.executors import Work
from irpe.ablation.worker import CellError, CellState, read_state, run_here, write_state
from irpe.errors import UserError
from irpe.extras import require
from irpe.files import write_text
from irpe.train.processes import StoppedError

_JOB = "job.json"  # the id of a cell's SLURM job
_PATIENCE = 20  # seconds until a file that another node wrote is seen
_UNKNOWN = "UNKNOWN"
_ACTIVE = {
    "PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED",
    "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED", "SPECIAL_EXIT",
}  # fmt: skip


class Slurm:
    """SLURM jobs, by submitit; they go on when the ablation ends, and are found by their folders.

    Args:
        parameters: Of submitit: `partition`, `gpus_per_node`, `timeout_min` (60 if not given), ...
        is_resubmitting: Whether jobs that failed, were cancelled or timed out are submitted again.
        pause: Seconds between two questions to SLURM.
    """

    def __init__(
        self, parameters: Mapping[str, str], is_resubmitting: bool = False, pause: float = 5.0
    ) -> None:
        self.submitit, self.is_resubmitting = require("submitit", "slurm"), is_resubmitting
        numbers = {key: int(value) for key, value in parameters.items() if value.isdigit()}
        self.parameters: dict[str, Any] = {"timeout_min": 60, **parameters, **numbers}
        self.states = _SlurmStates(pause)

    def __str__(self) -> str:
        return f"SLURM jobs ({_joined(self.parameters)})"

    def submit(self, work: Work, cell: Cell, /) -> "SlurmFuture":
        """Has a cell run as a job, which is a process of its own; one that it has goes on."""
        path = cell.directory / _JOB
        job = str(json.loads(path.read_text())["id"]) if path.is_file() else None
        if job is not None and self.is_resubmitting and self.states.has_ended(job):
            job = None
        if job is None:
            try:
                executor = self.submitit.SlurmExecutor(cell.directory / "slurm")
                given = {"name": f"irpe-{cell.directory.name}", **self.parameters}
                executor.update_parameters(**executor._convert_parameters(given))
                job = str(executor.submit(_run_in_job, cell).job_id)
            except (ValueError, TypeError, RuntimeError, OSError) as error:
                raise UserError(f"--slurm {_joined(self.parameters)}: {error}") from error
            write_text(path, json.dumps({"id": job}) + "\n")
        return SlurmFuture(cell, job, self.states)

    def __enter__(self) -> "Slurm":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def stop(self) -> str:
        """Leaves the jobs alone."""
        return "its SLURM jobs go on"


def _save_and_stop(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _run_in_job(cell: Cell) -> CellResult:
    """Runs a cell in a SLURM job, which submitit sends SIGUSR2 when its time is nearly over."""
    signal.signal(signal.SIGUSR2, _save_and_stop)
    try:
        return run_here(cell)
    except StoppedError as error:
        failure = "it timed out or was preempted, and saved itself"
        write_state(cell, replace(read_state(cell) or CellState(), failure=failure))
        raise CellError(failure) from error


@dataclass(frozen=True)
class SlurmFuture:
    """The result of a cell that is a SLURM job."""

    cell: Cell
    job: str  # its id
    states: "_SlurmStates"

    def done(self) -> bool:
        """Returns whether the job has ended, or its result is there."""
        return read_result(self.cell) is not None or self.states.has_ended(self.job)

    def result(self) -> CellResult:
        """Returns the result, or raises an error that says what became of the job."""
        state, end = self.states.of(self.job), time.monotonic() + _PATIENCE
        while (found := read_result(self.cell)) is None:
            if state != "COMPLETED" or time.monotonic() > end:  # a shared folder may be late
                break
            time.sleep(0.5)
        if found is not None:
            return found
        said = read_state(self.cell)
        why = f", {said.failure}" if state == "FAILED" and said and said.failure else ""
        ended = "is no longer known to SLURM" if state == _UNKNOWN else f"ended as {state}"
        raise CellError(f"SLURM job {self.job} {ended}{why}; --resubmit submits it again")


class _SlurmStates:
    """The states of this user's jobs: of the controller, else of the accounting where it is."""

    def __init__(self, pause: float) -> None:
        self.pause, self.asked = pause, -math.inf
        self.jobs: dict[str, str] = {}

    def of(self, job: str) -> str:
        """Returns the last known state of a job."""
        if job not in self.jobs or time.monotonic() - self.asked > self.pause:
            self._ask(job)
        return self.jobs[job]

    def has_ended(self, job: str) -> bool:
        """Returns whether a job has ended, well or not."""
        return self.of(job) not in _ACTIVE

    def _ask(self, job: str) -> None:
        self.asked = time.monotonic()
        self.jobs.setdefault(job, "PENDING")
        known = _ask_slurm("squeue", "--me", "--noheader", "--states=all", "--format=%i|%T")
        if known is None:  # the controller is away: nothing is known to have changed
            return
        ended = [each for each in self.jobs if each not in known]
        if ended:
            options = ("-X", "--noheader", "--parsable2", "--format=JobID,State")
            known |= _ask_slurm("sacct", *options, "-j", ",".join(ended)) or {}
        self.jobs = {each: known.get(each, _UNKNOWN) for each in self.jobs}


def _ask_slurm(*command: str) -> dict[str, str] | None:
    """Returns the states of jobs by id; `None` if nobody answers."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    pairs = (line.partition("|") for line in answer.stdout.splitlines())
    return {job.strip(): state.split()[0] for job, _, state in pairs if state.strip()}


class Dask:
    """Tasks of a Dask scheduler; they go on when the ablation ends, and are found by their names.

    Those that failed are forgotten by the scheduler, and run again by the next ablation.

    Args:
        address: The scheduler's, as in "tcp://HOST:8786".
    """

    def __init__(self, address: str) -> None:
        self.distributed = require("distributed", "dask")
        try:
            self.client = self.distributed.Client(address, timeout=10, set_as_default=False)
        except (OSError, ValueError) as error:
            raise UserError(
                f"--cluster dask:{address}: no scheduler answers there ({error}): start one, as in "
                "`dask scheduler`, and name its address"
            ) from error
        self.address = address

    def __str__(self) -> str:
        return f"Dask tasks ({self.address})"

    def submit(self, work: Work, cell: Cell, /) -> Any:
        """Has a cell run as a task; one that the scheduler has already goes on."""
        name = f"irpe-{cell.directory}"
        future = self.client.submit(work, cell, key=name, pure=False)
        self.distributed.fire_and_forget(future)
        return future

    def stop(self) -> str:
        """Leaves the tasks alone."""
        return "its Dask tasks go on"

    def __enter__(self) -> "Dask":
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()


def parse_cluster(
    text: str, parameters: Mapping[str, str] | None = None, is_resubmitting: bool = False
) -> Slurm | Dask:
    """Returns the executor of a text: "slurm" or "dask:ADDRESS".

    Args:
        text: The text.
        parameters: Of SLURM jobs.
        is_resubmitting: Whether SLURM jobs that failed are submitted again.

    Examples:
        >>> import irpe.ablation
        >>> irpe.ablation.parse_cluster("moon")
        Traceback (most recent call last):
        ...
        irpe.errors.UserError: --cluster 'moon' must be slurm or dask:ADDRESS, as in ...
    """
    kind, _, address = text.partition(":")
    if text == "slurm":
        return Slurm(parameters or {}, is_resubmitting)
    if parameters:
        raise UserError(f"--slurm {_joined(parameters)} needs --cluster slurm")
    if kind == "dask" and address:
        return Dask(address)
    raise UserError(f"--cluster {text!r} must be slurm or dask:ADDRESS, as in dask:tcp://HOST:8786")


def _joined(parameters: Mapping[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in parameters.items())
