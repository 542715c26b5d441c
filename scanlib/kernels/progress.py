"""Progress bars of long loops: what their polls tell, drawn by tqdm.

With the flag ``scanlib__progress`` a `poll` calls ``progress_ask``. It looks for signals, as polls
do in any case, and then now and then calls a function of Python's, which looks at the frame.
``run_parts`` (`scanlib.kernels.parts`) calls that, too, at its end. Without the flag there is
neither.

A signal may raise an exception anywhere in Python's code, even before its first line, which is lost
where that was called by compiled code. So it is the last line that says to go on.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from time import monotonic
from typing import Any

from pytensor.configdefaults import config

from scanlib.kernels.language import ANSWER, FRAME, FULL, INTERRUPTED, PROGRESS

SILENT = 1.0  # seconds that a loop runs without a bar
INTERVAL = 0.1  # seconds between two looks at a bar
DONE, FAILED = -1, -2  # in the place of the number of steps: a run has ended
ASKING = "progress_ask"  # the function that polls call
_Frame = ctypes.c_int64 * FRAME
_TELL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
TOLD = "scanlib_tell"  # the word with the address of a function of Python's
OFTEN = 16  # polls, of which one is told
# What `TEXT` calls.
SYMBOLS = (
    "PyGILState_Ensure",
    "PyGILState_Release",
    "PyErr_CheckSignals",
    "PyErr_Fetch",
    "PyErr_Restore",
)
TEXT = f"""
declare i32 @PyGILState_Ensure()
declare void @PyGILState_Release(i32)
declare i32 @PyErr_CheckSignals()
declare void @PyErr_Fetch(ptr, ptr, ptr)
declare void @PyErr_Restore(ptr, ptr, ptr)
@{TOLD} = global ptr null
@scanlib_polls = internal global i64 0
define internal i32 @run_told(ptr %frame) {{
  %kind.p = alloca ptr
  %value.p = alloca ptr
  %trace.p = alloca ptr
  call void @PyErr_Fetch(ptr %kind.p, ptr %value.p, ptr %trace.p)
  %place = getelementptr i8, ptr %frame, i64 {8 * ANSWER}
  store i64 1, ptr %place
  %function = load ptr, ptr @{TOLD}
  call void %function(ptr %frame)
  %kind = load ptr, ptr %kind.p
  %value = load ptr, ptr %value.p
  %trace = load ptr, ptr %trace.p
  call void @PyErr_Restore(ptr %kind, ptr %value, ptr %trace)
  %word = load i64, ptr %place
  %answer = trunc i64 %word to i32
  ret i32 %answer
}}
define i32 @{ASKING}(ptr %frame) {{
entry:
  %lock = call i32 @PyGILState_Ensure()
  %signal = call i32 @PyErr_CheckSignals()
  %none = icmp eq i32 %signal, 0
  br i1 %none, label %count, label %leave
count:
  %polls = load i64, ptr @scanlib_polls
  %more = add i64 %polls, 1
  store i64 %more, ptr @scanlib_polls
  %rest = and i64 %polls, {OFTEN - 1}
  %now = icmp eq i64 %rest, 0
  br i1 %now, label %tell, label %leave
tell:
  %said = call i32 @run_told(ptr %frame)
  br label %leave
leave:
  %answer = phi i32 [ 1, %entry ], [ 0, %count ], [ %said, %tell ]
  call void @PyGILState_Release(i32 %lock)
  ret i32 %answer
}}
define i64 @run_parts(ptr %table, ptr %frame) {{
  %code = call i64 @run_untold(ptr %table, ptr %frame)
  %full = icmp eq i64 %code, {FULL}
  br i1 %full, label %goes.on, label %ended
goes.on:
  ret i64 %code
ended:
  %fine = icmp eq i64 %code, 0
  %word = select i1 %fine, i64 {DONE}, i64 {FAILED}
  %place = getelementptr i8, ptr %frame, i64 {8 * PROGRESS}
  store i64 %word, ptr %place
  %lock = call i32 @PyGILState_Ensure()
  %wanted = call i32 @run_told(ptr %frame)
  call void @PyGILState_Release(i32 %lock)
  %interrupted = icmp ne i32 %wanted, 0
  %both = and i1 %fine, %interrupted
  %last = select i1 %both, i64 {INTERRUPTED}, i64 %code
  ret i64 %last
}}"""


def wants_progress() -> bool:
    """Return whether loops that are compiled now show their progress.

    Raises
    ------
    ImportError
        If they should, and tqdm is not installed.
    """
    if config.scanlib__progress:
        _bar_class()
    return bool(config.scanlib__progress)


def _bar_class() -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise ImportError(
            "scanlib__progress=True needs tqdm, which is not installed: "
            "pip install 'pytensor-scanlib[progress]'"
        ) from None
    return tqdm


@dataclass
class _Run:
    start: float
    next: float  # when it is looked at
    bar: Any = None


class Progress:
    """Draws how far the runs of a loop are.

    Parameters
    ----------
    name : str
        Of the loop.
    known : bool
        Whether it takes all steps that it may take.

    Attributes
    ----------
    address : int
        Of the function that is told how far a run is, with its frame.
    error : BaseException or None
        What ended a run, since nothing can be raised through compiled code.
    """

    def __init__(self, name: str, known: bool) -> None:
        self.name, self.known = name, known
        self.error: BaseException | None = None
        self._runs: dict[int, _Run] = {}  # by their frames
        self._function = _TELL(self._told)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def _told(self, frame: int) -> None:
        try:
            words = _Frame.from_address(frame)
            self._draw(frame, words[PROGRESS], words[PROGRESS + 1])
            words[ANSWER] = 0
        except BaseException as error:
            self.error = error

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


@cache
def progress_of(name: str, known: bool) -> Progress:
    """Return what draws the progress of a loop."""
    return Progress(name, known)
