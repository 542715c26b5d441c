"""The handler of the custom call that runs kernels."""

from __future__ import annotations

import ctypes
from importlib.resources import files

from scanlib.backends.jax.libraries import identity, load_library

OPTIONS = ("-O2", "-std=c++17", "-w", "-ldl")


def load_handler() -> ctypes.CDLL | None:
    """Return the library that holds ``scanlib_handler``, None if it cannot be compiled."""
    text = files("scanlib.backends.cuda").joinpath("template", "handler.cpp").read_text()
    return load_library(f"scanlib_cuda_{identity(text, OPTIONS)}", text, OPTIONS)
