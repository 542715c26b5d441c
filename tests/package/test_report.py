"""``python -m scanlib``, the report for bug reports."""

import re

import pytest

import scanlib
from scanlib import __main__ as report
from tests.modes import MODES


def test_a_report(monkeypatch, capsys):
    monkeypatch.setattr(report, "linkers", lambda: {"Python": MODES["py"]})
    assert report.main() == 0
    told = capsys.readouterr().out
    assert f"scanlib    {scanlib.__version__} (" in told
    assert re.search(r"^pytensor   \d+\.\d+", told, re.MULTILINE)
    assert re.search(r"^cache      \S+", told, re.MULTILINE)
    assert re.search(r"^  Python   ok: compiled in [\d.]+ s, a call takes \d+ µs$", told, re.M)


def test_a_linker_that_fails(monkeypatch, capsys):
    def broken(mode):
        raise OSError("no disk\nat all")

    monkeypatch.setattr(report, "linkers", lambda: {"numba": None, "C": None})
    monkeypatch.setattr(report, "check", broken)
    assert report.main() == 1
    assert "numba    FAILED: OSError: no disk\n" in capsys.readouterr().out


def test_time_runs_out(monkeypatch, capsys):
    monkeypatch.setattr(report, "linkers", lambda: {"C": None})
    monkeypatch.setattr(report, "TIME_LIMIT", -1.0)
    assert report.main() == 0
    assert "left out" in capsys.readouterr().out


@pytest.mark.slow
def test_all_linkers_that_are_here(capsys):
    assert report.main() == 0
    assert "ok: compiled" in capsys.readouterr().out
