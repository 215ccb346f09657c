"""Requests to stop: SIGTERM and SIGINT as a flag that the training loop reads between steps."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

_STOPS = (signal.SIGTERM, signal.SIGINT)


class StoppedError(RuntimeError):
    """A run that was asked to stop, and saved itself.

    Args:
        message: How far it came.
        number: The signal that asked.
    """

    def __init__(self, message: str, number: int = signal.SIGTERM) -> None:
        super().__init__(message)
        self.number = number


class StopRequest(threading.Event):
    """Set when the process is asked to stop; `number` is the signal that asked."""

    number: int = signal.SIGTERM


@contextmanager
def stop_requests() -> Generator[StopRequest]:
    """Turns SIGTERM and SIGINT into a request to stop; a second SIGINT ends the program at once."""
    stopped = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in _STOPS}

    def ask(number: int, frame: object) -> None:
        stopped.number = number
        stopped.set()
        if number == signal.SIGINT:  # a launcher may send SIGTERM twice, a user means it
            signal.signal(number, before[number])

    for number in _STOPS:
        signal.signal(number, ask)
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
