"""scanlib's flags, set like all of PyTensor's through ``pytensor.config`` or PYTENSOR_FLAGS."""

import warnings
from collections.abc import Iterable
from difflib import get_close_matches

from pytensor.configdefaults import config
from pytensor.configparser import BoolParam, EnumStr, IntParam

_FLAGS = {
    "scanlib__perform": (
        EnumStr("auto", ["numba", "python"]),
        "How loops run outside numba mode (C linker, FAST_COMPILE, debug mode): as C code under "
        "the C linker where there is some, else compiled with numba where possible (auto), "
        "compiled with numba or an error (numba), or in plain Python (python).",
    ),
    "scanlib__simplify": (
        BoolParam(True),
        "Whether loops are simplified: unused and duplicate parts dropped, work hoisted, loops "
        "merged, histories that nobody reads not stored.",
    ),
    "scanlib__lower": (
        BoolParam(True),
        "Whether loops with elementwise bodies are lowered to kernels of their own.",
    ),
    "scanlib__keep_memory": (
        IntParam(512, lambda kept: kept >= 0),
        "How many MiB of freed memory the C library keeps for reuse, in the whole process, once a "
        "loop has been compiled; fresh memory costs more than filling it. 0 changes nothing.",
    ),
    "scanlib__linear": (
        BoolParam(True),
        "Whether loops around a matrix recurrence (also in logarithms, or of maxima) are lowered.",
    ),
    "scanlib__threads": (
        IntParam(1, lambda threads: threads >= 1),
        "Threads for loops over many channels and for long series, in numba mode and under the C "
        "linker. "
        "Results are the same, bit by bit, at every run with as many threads.",
    ),
    "scanlib__parallel_channels": (
        IntParam(250_000, lambda least: least >= 1),
        "The least number of channels times steps for each thread; loops with less use fewer "
        "threads.",
    ),
    "scanlib__parallel_steps": (
        IntParam(250_000, lambda least: least >= 1),
        "The least number of steps of one series for each thread; shorter series use fewer "
        "threads.",
    ),
    "scanlib__split": (
        BoolParam(True),
        "Whether loops are taken apart into batches over all steps and the smallest loops that "
        "remain.",
    ),
    "scanlib__split_maps": (
        BoolParam(True),
        "Whether splitting evaluates what reads no state, or is read by none, as a batch.",
    ),
    "scanlib__split_sums": (
        BoolParam(True),
        "Whether splitting turns sums over the steps into sums over rows and matrix products.",
    ),
    "scanlib__progress": (
        BoolParam(False),
        "Whether a loop that runs longer than a second shows a progress bar, which takes tqdm: "
        "loops with kernels, on a CPU, in functions that are compiled while the flag is set.",
    ),
    "scanlib__adopt": (
        BoolParam(False),
        "Whether loops built with pytensor.scan, and their gradients, become scanlib's loops when "
        "a function is compiled; the same as scanlib.enable().",
    ),
    "scanlib__cuda": (
        BoolParam(True),
        "Whether elementwise loops and matrix recurrences on CUDA devices, under JAX and PyTorch, "
        "run as scanlib's kernels. Without, and where there is no kernel, they are made of "
        "functions of JAX or PyTorch.",
    ),
}
for _name, (_kind, _text) in _FLAGS.items():
    config.add(_name, _text, _kind, in_c_key=False)


def _unknown_flags(names: Iterable[str]) -> str:
    """Say which of these names look like scanlib's flags and are none."""
    unknown = sorted(name for name in names if name.startswith("scanlib__"))
    flags = [name for name in dir(type(config)) if name.startswith("scanlib__")] if unknown else []
    lines = []
    for name in unknown:
        close = get_close_matches(name, flags, 1)
        lines.append(f"{name} is no flag of scanlib" + (f"; write {close[0]}" if close else ""))
    return ", ".join(lines)


def check_flags() -> None:
    """Raise if `pytensor.config`, which takes any name, was given one of a flag that is none.

    Raises
    ------
    ValueError
        With the name that is closest.
    """
    unknown = _unknown_flags(vars(config))
    if unknown:
        raise ValueError(f"pytensor.config: {unknown}, and del the attribute")


# What is left of PYTENSOR_FLAGS; PyTensor warns of all that scanlib had not defined yet.
_unknown = _unknown_flags(config._flags_dict)
if _unknown:
    warnings.warn(f"PYTENSOR_FLAGS: {_unknown}", UserWarning, stacklevel=2)
