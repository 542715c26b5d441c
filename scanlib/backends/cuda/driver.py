"""NVIDIA's driver: loads kernels and launches them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

LIBRARY = "libcuda.so.1"
PROCESSORS, MAJOR, MINOR = 16, 75, 76  # attributes of a device


class DriverError(RuntimeError):
    """The driver refused something."""


class Driver:
    """The functions of the driver that are needed.

    Parameters
    ----------
    path : str
        Of the library.

    Raises
    ------
    OSError
        If it cannot be loaded.
    """

    def __init__(self, path: str = LIBRARY) -> None:
        self.path = path
        self.library = ctypes.CDLL(path)
        self._primary: dict[int, int] = {}
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the driver.

        Raises
        ------
        DriverError
        """
        status = getattr(self.library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(status, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise DriverError(f"{name} failed with status {status}: {reason}")

    def primary_context(self, device: int) -> int:
        """Return the context of a device that all libraries share, made if need be.

        A thread that has not yet used the device has no context of its own.
        """
        if device not in self._primary:
            place, context = ctypes.c_int(), ctypes.c_void_p()
            self.call("cuDeviceGet", ctypes.byref(place), device)
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), place)
            self._primary[device] = context.value or 0
        return self._primary[device]

    @contextmanager
    def current(self, context: int) -> Iterator[None]:
        """Make a context the current one."""
        self.call("cuCtxPushCurrent_v2", ctypes.c_void_p(context))
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def attribute(self, number: int) -> int:
        """Return an attribute of the current context's device."""
        device, value = ctypes.c_int(), ctypes.c_int()
        self.call("cuCtxGetDevice", ctypes.byref(device))
        self.call("cuDeviceGetAttribute", ctypes.byref(value), number, device)
        return value.value

    def architecture(self) -> str:
        """Return the architecture of the current context's device, such as ``"sm_90"``."""
        return f"sm_{self.attribute(MAJOR)}{self.attribute(MINOR)}"

    def load(self, code: bytes, names: Sequence[str]) -> list[int]:
        """Load machine code into the current context; return the handles of its kernels."""
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), code)
        handles = []
        for name in names:
            function = ctypes.c_void_p()
            self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
            handles.append(function.value or 0)
        return handles

    def launch(
        self, function: int, blocks: int, threads: int, stream: int, words: ctypes.Array
    ) -> None:
        """Launch a kernel whose one argument is a struct of 64-bit integers."""
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(words))
        self.call(
            "cuLaunchKernel",
            ctypes.c_void_p(function),
            *map(ctypes.c_uint, (blocks, 1, 1, threads, 1, 1, 0)),
            ctypes.c_void_p(stream),
            arguments,
            None,
        )


@cache
def find_driver() -> Driver | None:
    """Return the driver, None where there is none or no device."""
    try:
        return Driver()
    except (OSError, DriverError):
        return None
