"""Ctrl-C: a long loop ends at once, and its function can be called again."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the system has no timers")


def assert_interrupted(linker, *names):
    command = [sys.executable, "-m", "tests.interrupted_loops", linker, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "TOO LATE" not in done.stdout, done.stdout
    assert "its end" not in done.stdout, done.stdout
    assert "all ended" in done.stdout, done.stdout


@pytest.mark.parametrize("linker", ["numba", "c", "perform"])
def test_a_long_loop_ends_at_once(linker):
    assert_interrupted(linker, "one channel", "arrays")


@pytest.mark.slow
@pytest.mark.parametrize("linker", ["numba", "c", "perform"])
def test_every_long_loop_ends_at_once(linker):
    assert_interrupted(linker)


@pytest.mark.slow
def test_a_long_loop_ends_at_once_under_torch():
    pytest.importorskip("torch")
    assert_interrupted("torch", "one channel", "wide", "arrays")
