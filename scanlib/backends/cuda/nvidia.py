"""NVIDIA's libraries: the compiler, NVRTC, and the driver, which loads kernels and launches them.

Kernels are compiled at first use. NVRTC is looked for in the packages that PyTorch and JAX install
(``nvidia-cuda-nvrtc``), among the system's libraries, and in ``CUDA_HOME``. What was compiled is
kept in PyTensor's compilation directory, under a name made of the source, the architecture and the
compiler's version.
"""

import ctypes
import ctypes.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from hashlib import sha256
from pathlib import Path

from pytensor.configdefaults import config

from scanlib.kept_files import kept

OPTIONS = ("-std=c++17", "-w", "-fmad=false")  # multiply-adds are fused where written as such
LIBRARY = "libcuda.so.1"
PROCESSORS, MAJOR, MINOR = 16, 75, 76  # attributes of a device


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

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self.library, f"nvrtc{name}")(*arguments)
        if status:
            text = self.library.nvrtcGetErrorString(status).decode()
            raise KernelCompileError(f"{self.version}: {text}")

    def compile(self, source: str, architecture: str) -> bytes:
        """Return the machine code for an architecture, such as ``"sm_90"``."""
        program, text = ctypes.c_void_p(), source.encode()
        self.call("CreateProgram", ctypes.byref(program), text, b"scanlib.cu", 0, None, None)
        options = [f"--gpu-architecture={architecture}", "--device-as-default-execution-space"]
        encoded = [option.encode() for option in [*options, *OPTIONS]]
        array = (ctypes.c_char_p * len(encoded))(*encoded)
        try:
            if self.library.nvrtcCompileProgram(program, len(encoded), array):
                raise KernelCompileError(self._text(program, "ProgramLog").decode(errors="replace"))
            return self._text(program, "CUBIN")
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self.call(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(f"Get{what}", program, buffer)
        return buffer.raw


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
    """Return the compiler; `NoCompilerError` if there is none."""
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
    """Return the machine code of a translation unit for an architecture, such as ``"sm_90"``, from
    the disk if it is there; else it may raise `NoCompilerError` or `KernelCompileError`."""
    compiler = find_compiler()
    identity = "\n".join([compiler.version, architecture, *OPTIONS, source])
    name = sha256(identity.encode()).hexdigest()[:32]
    make = partial(compiler.compile, source, architecture)
    return kept(folder(), name, ".cubin", make)[1]


class DriverError(RuntimeError):
    """The driver refused something."""


class Driver:
    """The functions of the driver that are needed; `OSError` if its library cannot be loaded."""

    def __init__(self, path: str = LIBRARY) -> None:
        self.path = path
        self.library = ctypes.CDLL(path)
        self._primary: dict[int, int] = {}
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the driver; `DriverError` if it fails."""
        status = getattr(self.library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(status, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise DriverError(f"{name} failed with status {status}: {reason}")

    def primary_context(self, device: int) -> int:
        """Return a device's context that all libraries share: a thread may have none yet."""
        if device not in self._primary:
            place, context = ctypes.c_int(), ctypes.c_void_p()
            self.call("cuDeviceGet", ctypes.byref(place), device)
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), place)
            self._primary[device] = context.value or 0
        return self._primary[device]

    @contextmanager
    def current(self, context: int) -> Iterator[None]:
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
