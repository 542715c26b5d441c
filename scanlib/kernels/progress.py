"""Progress bars of long loops: what their polls tell, drawn by tqdm.

With the flag ``scanlib__progress`` a `poll` calls a function of Python's, which looks at the frame;
so does the caller of a loop at its end. Signals are noticed there, as by any code of Python's. A
signal may raise an exception even before the first line of the function, which is lost where that
was called by compiled code. So it is the last line that says to go on.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from time import monotonic
from typing import Any

from pytensor.configdefaults import config

from scanlib.kernels.language import ANSWER, FRAME, PROGRESS

SILENT = 1.0  # seconds that a loop runs without a bar
INTERVAL = 0.1  # seconds between two looks at a bar
DONE, FAILED = -1, -2  # in the place of the number of steps: a run has ended
_Frame = ctypes.c_int64 * FRAME
_TELL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


def wants_progress() -> bool:
    """Return whether loops that are compiled now show their progress; an `ImportError` without
    tqdm."""
    if config.scanlib__progress:
        _bar_class()
    return bool(config.scanlib__progress)


def _bar_class() -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise ImportError(
            "scanlib__progress=True needs tqdm, which is not installed: pip install tqdm"
        ) from None
    return tqdm


@dataclass
class _Run:
    start: float
    next: float  # when it is looked at
    bar: Any = None


class Progress:
    """Draws how far the runs of a loop are; `known`: it takes all steps that it may take.

    `address` is that of the function that is told how far a run is, with its frame; it returns
    zero, and says so in the frame, to go on. `error` is what ended a run, since nothing can be
    raised through compiled code.
    """

    def __init__(self, name: str, known: bool) -> None:
        self.name, self.known = name, known
        self.error: BaseException | None = None
        self._runs: dict[int, _Run] = {}  # by their frames
        self._function = _TELL(self.tell)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def tell(self, frame: int) -> int:
        try:
            words = _Frame.from_address(frame)
            self._draw(frame, words[PROGRESS], words[PROGRESS + 1])
            words[ANSWER] = 0
        except BaseException as error:
            self.error = error
            return 1
        return 0

    def _draw(self, frame: int, step: int, steps: int) -> None:
        if step < 0:
            run = self._runs.pop(frame, None)
            if run is not None and run.bar is not None:
                if step == DONE and run.bar.total is not None:
                    run.bar.update(run.bar.total - run.bar.n)
                run.bar.close()
            return
        now, run = monotonic(), self._runs.get(frame)
        if run is None:
            self._runs[frame] = _Run(now, now + SILENT)
        elif now >= run.next:
            run.next = now + INTERVAL
            if run.bar is None:
                total = steps if self.known else None
                run.bar = _bar_class()(desc=self.name, total=total, unit=" steps", unit_scale=True)
                run.bar.start_t -= now - run.start
            run.bar.update(step - run.bar.n)

    def taken_error(self) -> BaseException:
        """Return what ended a run, once."""
        error, self.error = self.error, None
        return error or KeyboardInterrupt()


progress_of = cache(Progress)  # what draws the progress of a loop
