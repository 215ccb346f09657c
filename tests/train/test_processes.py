"""What a process of several is told."""

import pytest

from irpe.train.processes import TIMEOUT_VARIABLE, _read_timeout


@pytest.mark.parametrize(("text", "seconds"), [("", 1800.0), ("10", 10.0)])
def test_the_time_that_a_process_waits_for_another(monkeypatch, text, seconds):
    monkeypatch.setenv(TIMEOUT_VARIABLE, text)
    assert _read_timeout() == seconds


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_times_that_are_none(monkeypatch, text):
    monkeypatch.setenv(TIMEOUT_VARIABLE, text)
    with pytest.raises(ValueError, match=f"IRPE_TIMEOUT = '{text}' must be from 1 to 1,000,000"):
        _read_timeout()
