"""Libraries of handlers that XLA calls: compiled with the headers that jaxlib ships."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import cache

import jax
import jaxlib
from pytensor.configdefaults import config

from scanlib.backends.handler.library import load_library, python_options, source
from scanlib.backends.handler.programs import address

OPTIONS = ("-O1", "-std=c++11", "-w")  # with newer standards, headers of C take long
TARGET = "scanlib_program"  # the handler of all programs, for XLA

_registered: set[str] = set()


def load_for_xla(name: str, text: str, options: Sequence[str]) -> ctypes.CDLL | None:
    """Return the library of code that XLA calls, None if it cannot be compiled."""
    options = [f"-I{jax.ffi.include_dir()}", *options]
    return load_library(str(config.cxx), f"{name}_{jaxlib.__version__}", text, options)


def load_handler() -> ctypes.CDLL | None:
    """Return the library with the handler that runs CUDA kernels, None if there is none."""
    return load_for_xla("scanlib_cuda", source("cuda.cpp"), [*OPTIONS, "-ldl"])


@cache
def program_handler() -> ctypes.CDLL | None:
    """Return the library with the handler of loop programs, which XLA knows from then on."""
    found = load_for_xla("scanlib_xla", source("xla.cpp"), [*OPTIONS, *python_options()])
    if found is None:
        return None
    found.scanlib_set_main_thread(ctypes.c_ulong(threading.main_thread().ident or 0))
    found.scanlib_register.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
    capsule = jax.ffi.pycapsule(found.scanlib_program_handler)
    jax.ffi.register_ffi_target(TARGET, capsule, platform="cpu")
    return found


def register_program(key: str) -> None:
    """Let the handler find a program."""
    handler = program_handler()
    if handler is not None and key not in _registered:
        handler.scanlib_register(key.encode(), address(key))
        _registered.add(key)
