"""Progress bars: what a loop tells while it runs, with the flag ``scanlib__progress``."""

import sys

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import OPT_FAST_RUN, Mode
from pytensor.configdefaults import config

from scanlib import scan, until
from scanlib.backends.handler import thunks
from scanlib.kernels import progress

MODES = {"numba": "NUMBA", "c": Mode("cvm", OPT_FAST_RUN), "FAST_COMPILE": "FAST_COMPILE"}
STEPS = 300_000
n, x = pt.lscalar("n"), pt.dvector("x")
places = pt.lvector("places")


class Bar:
    """Stands for tqdm's."""

    made: list = []  # noqa: RUF012

    def __init__(self, desc, total, unit, unit_scale):
        self.desc, self.total, self.n, self.start_t = desc, total, 0, 0.0
        self.is_closed = False
        Bar.made.append(self)

    def update(self, count):
        assert count >= 0
        assert not self.is_closed
        self.n += count

    def close(self):
        self.is_closed = True


@pytest.fixture
def bars(monkeypatch):
    monkeypatch.setattr(progress, "_bar_class", lambda: Bar)
    monkeypatch.setattr(progress, "SILENT", 0.0)
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    Bar.made.clear()
    with config.change_flags(scanlib__progress=True):
        yield Bar.made


def logistic(h):
    return 3.7 * h * (1.0 - h)


def compiled(step, *others, mode, sequences=None, steps=n):
    y, _ = scan(step, sequences, [x[0]], list(others), n_steps=steps, name="map")
    return pytensor.function([x, n, places], y[-1], mode=MODES[mode], on_unused_input="ignore")


@pytest.mark.parametrize("mode", MODES)
def test_steps_are_told(mode, bars):
    f = compiled(logistic, mode=mode)
    assert np.isfinite(f([0.3], STEPS, [0]))
    (bar,) = bars
    assert (bar.desc, bar.total, bar.n, bar.is_closed) == ("map", STEPS, STEPS, True)


@pytest.mark.parametrize("mode", MODES)
def test_a_loop_that_may_stop_has_no_total(mode, bars):
    f = compiled(lambda h: (logistic(h), until(h > 2.0)), mode=mode)
    f([0.3], STEPS, [0])
    assert bars
    assert all(bar.total is None and bar.is_closed for bar in bars)
    assert 0 < max(bar.n for bar in bars) <= STEPS


def test_a_loop_that_fails_closes_its_bar(bars):
    step = lambda i, h, x: h + x[pt.switch(h < -1, 0, i)]  # noqa: E731  (a place of the state's)
    f = compiled(step, x, mode="numba", sequences=places, steps=None)
    with pytest.raises(IndexError, match=r"at step 299999: index 7 is out of bounds"):
        f([0.3], 0, np.where(np.arange(STEPS) == STEPS - 1, 7, 0))
    (bar,) = bars
    assert bar.is_closed
    assert bar.n < STEPS


def test_it_does_where_there_is_no_compiler(bars, monkeypatch):
    monkeypatch.setattr(thunks, "library", lambda: None)
    test_a_loop_that_fails_closes_its_bar(bars)


@pytest.mark.parametrize("mode", MODES)
def test_an_error_of_the_bar_ends_the_loop(mode, bars, monkeypatch):
    def interrupt(self, count):
        raise KeyboardInterrupt

    f = compiled(logistic, mode=mode)
    with monkeypatch.context() as patch:
        patch.setattr(Bar, "update", interrupt)
        with pytest.raises(KeyboardInterrupt):
            f([0.3], 10**7, [0])
    assert np.isfinite(f([0.3], STEPS, [0]))


def test_short_loops_are_silent(bars, monkeypatch):
    monkeypatch.setattr(progress, "SILENT", 1000.0)
    assert np.isfinite(compiled(logistic, mode="numba")([0.3], STEPS, [0]))
    assert not bars


def test_without_the_flag_nothing_is_told():
    Bar.made.clear()
    assert np.isfinite(compiled(logistic, mode="numba")([0.3], STEPS, [0]))
    assert not Bar.made


def test_without_tqdm_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with (
        config.change_flags(scanlib__progress=True),
        pytest.raises(ImportError, match=r"needs tqdm.*pip install tqdm"),
    ):
        compiled(logistic, mode="numba")
