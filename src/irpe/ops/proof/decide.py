"""Which implementation a call takes: what was proved on its device, and the fastest of that.

Candidates run for the first time in another process, so that the random states, modes, streams and
memory of this one stay as they are. Within a compiler, an export, the capture of a CUDA graph and
on tensors without values nothing is proved: what is known is used.
"""

import os
import threading
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from irpe.core.bucket_map import BucketMap
from irpe.core.cached import traced_as_constant
from irpe.errors import check_choice
from irpe.ops.call import AttentionCall
from irpe.ops.proof.child import Child, ChildLostError
from irpe.ops.proof.judge import Answer, Implementation
from irpe.ops.proof.problem import Sizes
from irpe.ops.proof.serve import Task, save_maps
from irpe.ops.proof.signature import Signature, SizeClass, signature_of, size_class_of
from irpe.ops.proof.verdicts import Record, Records, Verdict, VerdictFile, cache_directory

_TIME_LIMIT = 120.0  # for one candidate: compiling takes most of it
_LONGEST_WAIT = 300.0


class Candidate(NamedTuple):
    """An implementation that is proved before it is used.

    Args:
        name: Its name.
        module: What has its `supports` and `attention`: a module, or "module:class".
        untimed: The dtypes in which it is taken where nothing may be timed; `None` for all.
    """

    name: str
    module: str
    untimed: tuple[str, ...] | None = None

    def load(self) -> Implementation:
        """Returns the module."""
        return resolve_name(self.module)


class Request(NamedTuple):
    """What is asked about a call.

    Args:
        signature: Its signature.
        size_class: Its sizes, rounded.
        able: The names of the candidates that take it, in order.
        device: Where it runs.
        sizes: Its sizes.
        maps: Its bucket maps.
    """

    signature: Signature
    size_class: SizeClass
    able: tuple[str, ...]
    device: torch.device
    sizes: Sizes
    maps: tuple[BucketMap, ...]


class Prover:
    """Proves candidates when they are first needed, and chooses among them.

    Args:
        candidates: The candidates, in the order in which they are taken where nothing is timed.
        fallback: What computes every call and needs no proof.
        time_limit: Seconds after which a candidate is given up.
        longest_wait: Seconds to wait for another process that proves.

    Attributes:
        choices: What this process has chosen, by the text of signature and sizes.
        recorded: Choices of an earlier process, which are made again: see `recall`.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        fallback: Candidate,
        time_limit: float = _TIME_LIMIT,
        longest_wait: float = _LONGEST_WAIT,
    ) -> None:
        self.candidates = {candidate.name: candidate for candidate in candidates}
        self.fallback = fallback
        self._implementations = {each.name: each.load() for each in candidates}
        self.choices: dict[str, str] = {}
        self.recorded: dict[str, str] = {}
        self._time_limit, self._longest_wait = time_limit, longest_wait
        self._records: Records = {}
        self._chosen: dict[tuple[object, ...], str] = {}
        self._collected: list[Request] | None = None
        self._warned = set[str]()
        self._lock = threading.RLock()

    def choose(self, call: AttentionCall, may_prove: bool = True) -> str:
        """Returns the name of the implementation that a call takes.

        Args:
            call: The call.
            may_prove: Whether what has not been proved yet is proved and timed now, where that is
                possible; else the best that is known is taken.
        """
        able = self._able(call)
        if not able:
            return self.fallback.name
        signature, size_class = signature_of(call), size_class_of(call)
        if not may_prove or not _can_run(call):
            return self._known_choice(tuple(signature), tuple(size_class), able, may_prove)
        if self._collected is not None:
            self._collected.append(self.request(call))
            return self.fallback.name
        key = (signature, size_class, able, torch.are_deterministic_algorithms_enabled())
        if key not in self._chosen:
            self.prove([self.request(call)])
            self._chosen[key] = self.best_known(signature, size_class, able)
            self.choices[_key(signature, size_class)] = self._chosen[key]
        return self._chosen[key]

    def recall(self, choices: Mapping[str, str]) -> None:
        """Makes the choices of an earlier process again: equal bits must not depend on a timing.

        Args:
            choices: The `choices` of that process; what is not in them is chosen anew.
        """
        self.recorded = dict(choices)
        self.choices.update(choices)
        self._chosen.clear()

    def request(self, call: AttentionCall) -> Request:
        """Returns what is asked about a call."""
        batch, heads, queries, _ = call.q.shape
        sizes = Sizes(batch, heads, queries, call.k.shape[2])
        about = (signature_of(call), size_class_of(call), self._able(call))
        return Request(*about, call.q.device, sizes, call.maps)

    def known(self, call: AttentionCall) -> dict[str, str]:
        """Returns what is known about each candidate that takes a call."""
        able = self._able(call)
        if _proof_is("off"):
            return dict.fromkeys(able, "IRPE_PROOF=off")
        signature, size_class = signature_of(call), size_class_of(call)
        return {name: self.describe(name, signature, size_class) for name in able}

    def prove(self, requests: Sequence[Request]) -> None:
        """Proves and times what is not known yet about some calls.

        One process of a machine does so at a time; the others wait for its verdicts, not for ever.
        """
        if _proof_is("off"):
            return
        with self._lock:
            file, start = VerdictFile(cache_directory()), time.monotonic()
            while time.monotonic() - start <= self._longest_wait:
                with file.lock(seconds=0.5) as is_held:
                    if not _proof_is("force"):
                        self._merge(file.read())
                    missing = [r for r in requests if self._pick(*r[:3]) is None]
                    if missing and is_held:
                        self._run(missing, file)
                    if not missing or is_held:
                        break
            else:
                self._warn(
                    f"another process has proved for {self._longest_wait:g} seconds: this one "
                    f"uses {self.fallback.name}"
                )
        self._warn_of_failures(requests)

    @contextmanager
    def collect(self) -> Generator[list[Request]]:
        """Gives a list to which the calls within are added; they take the fallback."""
        self._collected = []
        try:
            yield self._collected
        finally:
            self._collected = None

    @traced_as_constant
    def _known_choice(
        self,
        signature: tuple[Any, ...],
        size_class: tuple[int, ...],
        able: tuple[str, ...],
        is_taken: bool,
    ) -> str:
        of_call = Signature(*signature), SizeClass(*size_class)
        name = self.best_known(*of_call, able)
        if is_taken:
            self.choices[_key(*of_call)] = name
        return name

    def best_known(self, signature: Signature, size_class: SizeClass, able: tuple[str, ...]) -> str:
        """Returns what is best after all that is known: the fallback where nothing was proved."""
        if _proof_is("off"):
            return self.fallback.name
        verdicts = self._record(signature).verdicts
        proved = tuple(name for name in able if name in verdicts)
        name = self._pick(signature, size_class, proved)
        return name or self._without_times(signature, proved)

    def seconds(self, signature: Signature, size_class: SizeClass) -> dict[str, float | None]:
        """Returns the seconds of what was timed; `None` for what ran out of memory."""
        return self._record(signature).seconds.get(str(size_class), {})

    def _record(self, signature: Signature) -> Record:
        name = str(signature)
        if name not in self._records and not _proof_is("force"):
            self._merge(VerdictFile(cache_directory()).read())
        return self._records.get(name, Record())

    def _pick(
        self, signature: Signature, size_class: SizeClass, able: tuple[str, ...]
    ) -> str | None:
        """Returns the fastest of the candidates that passed; `None` if that is not known yet."""
        verdicts = self._records.get(str(signature), Record()).verdicts
        if any(name not in verdicts for name in able):
            return None
        names = [*(name for name in able if verdicts[name].passed), self.fallback.name]
        recorded = self.recorded.get(_key(signature, size_class))
        if recorded in names:
            return recorded
        if len(names) == 1 or not _is_timed():
            return self._without_times(signature, able)
        seconds = self.seconds(signature, size_class)
        if any(name not in seconds for name in names):
            return None
        return min(names, key=lambda name: seconds[name] or float("inf"))

    def _without_times(self, signature: Signature, able: tuple[str, ...]) -> str:
        """Returns the first candidate that passed and needs no timing, or the fallback."""
        verdicts = self._record(signature).verdicts
        for name in able:
            untimed = self.candidates[name].untimed
            if verdicts[name].passed and (untimed is None or signature.dtype in untimed):
                return name
        return self.fallback.name

    def _able(self, call: AttentionCall) -> tuple[str, ...]:
        """Returns the candidates that take a call, with the same bits each time if need be."""
        must_repeat = torch.are_deterministic_algorithms_enabled()
        return tuple(
            name
            for name, each in self._implementations.items()
            if each.supports(call) is None
            and (not must_repeat or getattr(each, "IS_DETERMINISTIC", False))
        )

    def _merge(self, records: Records) -> None:
        for name, record in records.items():
            self._records.setdefault(name, Record()).update(record)

    def _run(self, requests: Sequence[Request], file: VerdictFile) -> None:
        """Proves and times in another process, and writes what speaks of the candidates."""
        lasting: Records = {}
        with Child(self._time_limit) as child, TemporaryDirectory() as folder:
            for number, request in enumerate(requests):
                name = str(request.signature)
                record = self._records.setdefault(name, Record())
                kept = lasting.setdefault(name, Record())
                for able in request.able:
                    if able not in record.verdicts:
                        self._judge(child, request, able, record, kept)
                maps = Path(folder) / str(number)
                save_maps(request.maps, maps)
                self._time(child, request, maps, record, kept)
        problem = file.add(lasting)
        if problem is not None:
            self._warn(
                f"proofs cannot be kept ({problem}), so each process makes them anew: set "
                "IRPE_CACHE to a directory that can be written"
            )

    def _judge(
        self, child: Child, request: Request, name: str, record: Record, kept: Record
    ) -> None:
        answer = _ask(child, _task(self.candidates[name], request))
        date = datetime.now().isoformat(" ", "minutes")
        record.verdicts[name] = Verdict(answer.error, answer.worst, answer.where, date)
        if answer.is_lasting:
            kept.verdicts[name] = record.verdicts[name]

    def _time(
        self, child: Child, request: Request, maps: Path, record: Record, kept: Record
    ) -> None:
        """Times the candidates that passed, and the fallback, if that decides anything."""
        if self._pick(*request[:3]) is not None:
            return
        sizes, found = str(request.size_class), dict[str, float | None]()
        for name in (*request.able, self.fallback.name):
            verdict = record.verdicts.get(name)
            if verdict is not None and not verdict.passed:
                continue
            task = _task(self.candidates.get(name, self.fallback), request)
            answer = _ask(
                child,
                task._replace(sizes=request.sizes, maps=str(maps), fallback=self.fallback.module),
            )
            if answer.error and answer.is_lasting and verdict is not None:
                record.verdicts[name] = Verdict(answer.error, 0.0, "", verdict.date)
                kept.verdicts[name] = record.verdicts[name]
            else:
                found[name] = None if answer.error else answer.seconds
        for each in (record, kept):
            each.seconds.setdefault(sizes, {}).update(found)

    def _warn_of_failures(self, requests: Sequence[Request]) -> None:
        for request in requests:
            verdicts = self._records.get(str(request.signature), Record()).verdicts
            for name in request.able:
                if name in verdicts and not verdicts[name].passed:
                    used = self.best_known(*request[:3])
                    path = _write_reproduction(self.candidates[name], request, verdicts[name])
                    failure = f"{name} is not used for {request.signature}"
                    self._warn(
                        f"{failure}: {verdicts[name].error}. {used} is used. To see it again: "
                        f"python {path}",
                        of=failure,  # calls of other sizes may use another
                    )

    def _warn(self, text: str, of: str = "") -> None:
        """Warns once of a thing, by default of each text."""
        if (of or text) not in self._warned:
            self._warned.add(of or text)
            warnings.warn(text, stacklevel=2)

    def describe(self, name: str, signature: Signature, size_class: SizeClass) -> str:
        """Returns what is known about a candidate: proved when, how well, how fast."""
        verdict = self._record(signature).verdicts.get(name)
        if verdict is None:
            return f"not proved on {signature.device} yet: the first call does that"
        if not verdict.passed:
            return f"it failed its proof of {verdict.date}: {verdict.error}"
        text = (
            f"proved on {signature.device}, {verdict.date}: at most {verdict.worst:.2f} times "
            f"PyTorch's own error ({verdict.where})"
        )
        seconds = self.seconds(signature, size_class)
        names = [each for each in (name, self.fallback.name) if each in seconds]
        return "; ".join([text, *(f"{each} {_milliseconds(seconds[each])}" for each in names)])


def _key(signature: Signature, size_class: SizeClass) -> str:
    return f"{signature}; {size_class}"


def _task(candidate: Candidate, request: Request) -> Task:
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    return Task(candidate.module, request.signature, str(request.device), is_deterministic)


def _ask(child: Child, task: Task) -> Answer:
    try:
        return Answer(**child.ask(**task._asdict()))
    except ChildLostError as error:
        return Answer(str(error), is_lasting=error.is_lasting)


def _write_reproduction(candidate: Candidate, request: Request, verdict: Verdict) -> Path:
    """Writes a program that proves a candidate once more; returns its path."""
    text = f'''"""Proves {candidate.name!r} once more: {verdict.error}"""
from pkgutil import resolve_name

import torch

from irpe.ops.proof.judge import judge
from irpe.ops.proof.signature import Signature

signature = {request.signature!r}
print(judge(resolve_name({candidate.module!r}), signature, torch.device({str(request.device)!r})))
'''
    name = f"irpe-{candidate.name}-{sha256(text.encode()).hexdigest()[:8]}.py"
    for folder in (cache_directory(), Path(gettempdir())):
        if folder is not None:
            try:
                (folder / name).write_text(text)
            except OSError:
                continue
            return folder / name
    return Path(os.devnull)


def _milliseconds(seconds: float | None) -> str:
    return "ran out of memory" if seconds is None else f"{1000 * seconds:.3g} ms"


def _can_run(call: AttentionCall) -> bool:
    """Returns whether a proof may run now: not while a program is traced or captured."""
    if torch.compiler.is_compiling() or isinstance(call.q, FakeTensor):
        return False
    return not (call.q.is_cuda and torch.cuda.is_current_stream_capturing())


def _is_timed() -> bool:
    """Returns whether the fastest is taken: not where a timing must not decide about bits."""
    is_on = _setting("IRPE_TUNE", "on", "off") == "on"
    return is_on and not torch.are_deterministic_algorithms_enabled()


def _proof_is(setting: str) -> bool:
    return _setting("IRPE_PROOF", "on", "off", "force") == setting


@traced_as_constant
def _setting(name: str, *valid: str) -> str:
    value = os.environ.get(name) or valid[0]
    check_choice(name, value, valid)
    return value
