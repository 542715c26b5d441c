"""The handler of the custom call in Python, where no C++ compiler makes the faster one.

It does what ``cuda.cpp`` does, and takes Python's lock at every call. XLA's structs consist of
64-bit words (pointers, sizes, counts, and numbers padded to a word); they are read by position, as
``xla/ffi/api/c_api.h`` declares them.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from scanlib.backends.cuda.driver import Driver
from scanlib.backends.cuda.launch import Call, Kernels, Launch, launch

# Positions in the frame of a call, and in XLA's table of functions.
EXTENSION, API, CONTEXT = 1, 2, 3
ARGUMENTS, RESULTS, ATTRIBUTES = 5, 10, 15
SIZE, ITEMS, NAMES, VALUES = 2, 4, 4, 5  # in the lists of these
ERROR_CREATE, ERROR_DESTROY, STREAM_GET = 6, 8, 10
METADATA, INTERNAL = 1, 13  # a kind of extension; a kind of error

HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


def words(address: int, count: int) -> ctypes.Array:
    """Return 64-bit words in memory."""
    return (ctypes.c_uint64 * count).from_address(address)


def api_version() -> tuple[int, int]:
    """Return the version of the interface of which jaxlib ships the headers."""
    text = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    major, minor = re.findall(r"define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", text)
    return int(major), int(minor)


class Frame:
    """One call of the handler."""

    def __init__(self, address: int) -> None:
        self.words = words(address, 22)

    def answer(self, version: tuple[int, int]) -> bool:
        """Answer if XLA asks for the version of the interface, as it does first."""
        if not self.words[EXTENSION]:
            return False
        extension = words(self.words[EXTENSION], 4)
        if extension[1] & 0xFFFFFFFF != METADATA:
            return False
        metadata = words(extension[3], 4)
        metadata[3] = version[0] | version[1] << 32
        return True

    def buffers(self, which: int) -> list[int]:
        """Return the addresses of arguments or results."""
        items = words(self.words[which + ITEMS], self.words[which + SIZE])
        return [words(item, 4)[3] for item in items]

    def attributes(self) -> dict[str, Any]:
        """Return the attributes: lists of integers, and the name of the loop."""
        count = self.words[ATTRIBUTES + SIZE]
        names = words(self.words[ATTRIBUTES + NAMES], count)
        values = words(self.words[ATTRIBUTES + VALUES], count)
        found: dict[str, Any] = {}
        for name, value in zip(names, values, strict=True):
            key = _text(name)
            if key == "loop":
                found[key] = _text(value)
            else:
                _, size, data = words(value, 3)
                found[key] = list((ctypes.c_int64 * size).from_address(data))
        return found

    def function(self, number: int) -> Callable[[int], int | None]:
        """Return one of XLA's functions of one struct."""
        return FUNCTION(words(self.words[API], 12)[number])

    def stream(self) -> int | None:
        """Return the stream of the call, None if there is none."""
        given = (ctypes.c_uint64 * 4)(32, 0, self.words[CONTEXT], 0)
        error = self.function(STREAM_GET)(ctypes.addressof(given))
        if not error:
            return given[3]
        destroyed = (ctypes.c_uint64 * 3)(24, 0, error)
        self.function(ERROR_DESTROY)(ctypes.addressof(destroyed))
        return None

    def failed(self, text: str) -> int | None:
        """Return an error as XLA wants it."""
        message = ctypes.create_string_buffer(text.encode())
        given = (ctypes.c_uint64 * 4)(32, 0, ctypes.addressof(message), INTERNAL)
        return self.function(ERROR_CREATE)(ctypes.addressof(given))


def _text(address: int) -> str:
    place, size = words(address, 2)
    return ctypes.string_at(place, size).decode()


def python_handler(
    loops: dict[str, Kernels], driver: Callable[[], Driver], any_stream: bool
) -> Any:
    """Return a handler that runs in Python, as a function for `ctypes`.

    Parameters
    ----------
    loops : dict
        The kernels of each loop, by name.
    driver : callable
        Returns the driver.
    any_stream : bool
        Whether calls without a stream, as on the CPU, take the default one.
    """
    version = api_version()

    def handle(address: int) -> int | None:
        frame = Frame(address)
        if frame.answer(version):
            return None
        try:
            stream = frame.stream()
            if stream is None and not any_stream:
                raise RuntimeError("a loop was given no stream")
            run(frame, loops, driver(), stream or 0)
        except Exception as error:  # it cannot be raised through XLA
            return frame.failed(f"scanlib: {type(error).__name__}: {error}")
        return None

    return HANDLER(handle)


def run(frame: Frame, loops: dict[str, Kernels], driver: Driver, stream: int) -> None:
    """Launch the kernels of a call."""
    given = frame.attributes()
    numbers = given["launches"]
    launches = [Launch(*numbers[k : k + 3]) for k in range(0, len(numbers) - 2, 3)]
    call = Call(given["words"], given["slots"], [], launches)
    addresses = frame.buffers(ARGUMENTS) + frame.buffers(RESULTS)
    context = driver.context_of(stream)
    handles = loops[given["loop"]].handles(driver, context)
    with driver.current(context):
        launch(driver, handles, call, addresses, stream)
