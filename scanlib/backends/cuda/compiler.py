"""Compiles kernels at first use, by NVRTC.

NVRTC is looked for in the packages that PyTorch and JAX install (``nvidia-cuda-nvrtc``), among the
system's libraries, and in ``CUDA_HOME``. What was compiled is kept in PyTensor's compilation
directory, under a name made of the source, the architecture and the compiler's version.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
from collections.abc import Iterator
from functools import cache, partial
from hashlib import sha256
from pathlib import Path

from pytensor.configdefaults import config

from scanlib.kept_files import kept

OPTIONS = ("-std=c++17", "-w", "-fmad=false")  # multiply-adds are fused where written as such


class NoCompilerError(RuntimeError):
    """NVRTC was not found."""


class KernelCompileError(RuntimeError):
    """A kernel does not compile: an operation of the loop has no code for the device."""


class NVRTC:
    """NVIDIA's compiler as a library; `OSError` if it cannot be loaded from a path."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = f"nvrtc {major.value}.{minor.value}"
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def compile(self, source: str, architecture: str) -> bytes:
        """Return the machine code for an architecture, such as ``"sm_90"``."""
        program = ctypes.c_void_p()
        text = source.encode()
        self._check(
            self.library.nvrtcCreateProgram(
                ctypes.byref(program), text, b"scanlib.cu", 0, None, None
            )
        )
        options = [f"--gpu-architecture={architecture}", "--device-as-default-execution-space"]
        encoded = [option.encode() for option in [*options, *OPTIONS]]
        try:
            status = self.library.nvrtcCompileProgram(
                program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded)
            )
            if status:
                raise KernelCompileError(self._text(program, "ProgramLog").decode(errors="replace"))
            return self._text(program, "CUBIN")
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self.library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, status: int) -> None:
        if status:
            text = self.library.nvrtcGetErrorString(status).decode()
            raise KernelCompileError(f"{self.version}: {text}")


def nvrtc_paths() -> Iterator[str]:
    """Yield where NVRTC may be, the likeliest places first."""
    for folder in sys.path:
        parts = Path(folder) / "nvidia"
        if parts.is_dir():
            found = sorted(parts.glob("*/lib/libnvrtc.so.*"), reverse=True)
            yield from (str(path) for path in found)
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    for home in filter(None, homes):
        yield from (str(path) for path in Path(home).glob("lib64/libnvrtc.so*"))
    system = ctypes.util.find_library("nvrtc")
    if system:
        yield system


@cache
def find_nvrtc() -> NVRTC | None:
    """Return NVRTC, None where it is not installed."""
    for path in nvrtc_paths():
        try:
            return NVRTC(path)
        except (OSError, AttributeError):
            continue
    return None


def find_compiler() -> NVRTC:
    """Return the compiler.

    Raises
    ------
    NoCompilerError
        If there is none.
    """
    found = find_nvrtc()
    if found is None:
        raise NoCompilerError(
            "scanlib's CUDA kernels need NVRTC, which was not found. PyTorch and JAX for CUDA "
            "install it; alone it is `pip install nvidia-cuda-nvrtc`"
        )
    return found


def folder() -> Path:
    """Return where compiled kernels are kept."""
    return Path(config.base_compiledir) / "scanlib_cuda"


def compile_kernels(source: str, architecture: str) -> bytes:
    """Return the machine code of a translation unit for an architecture, such as ``"sm_90"``.

    It comes from the disk if it was compiled before.

    Raises
    ------
    NoCompilerError
    KernelCompileError
    """
    compiler = find_compiler()
    identity = "\n".join([compiler.version, architecture, *OPTIONS, source])
    name = sha256(identity.encode()).hexdigest()[:32]
    make = partial(compiler.compile, source, architecture)
    return kept(folder(), name, ".cubin", make)[1]
