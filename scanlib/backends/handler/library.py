"""C++ code of scanlib's own: compiled by the compiler that PyTensor uses, and kept on disk."""

import ctypes
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

from pytensor.configdefaults import config

from scanlib._compat import PYTHON_LIBRARIES, PYTHON_LIBRARY_FOLDERS
from scanlib.kept_files import kept


def source(name: str) -> str:
    """Return a file of this folder, with the headers of this folder where they are included."""
    folder = files("scanlib.backends.handler")
    text = folder.joinpath(name).read_text()
    for header in ("program.h", "xla.h", "lines.h", "compiled.h"):
        text = text.replace(f'#include "{header}"', folder.joinpath(header).read_text())
    return text


def python_options() -> list[str]:
    """Return the compiler's options for code that calls Python."""
    options = [f"-I{sysconfig.get_paths()['include']}"]
    if sys.platform != "win32":
        options.append("-pthread")
    if sys.platform == "darwin":
        options += ["-undefined", "dynamic_lookup"]
    if sys.platform == "win32":
        options += [f"-L{folder}" for folder in PYTHON_LIBRARY_FOLDERS()]
        options += [f"-l{library}" for library in PYTHON_LIBRARIES()]
    return options


def load_library(
    compiler: str,
    name: str,
    text: str,
    options: Sequence[str],
    kind: type[ctypes.CDLL] = ctypes.CDLL,
) -> ctypes.CDLL | None:
    """Return the library of some code, None if it cannot be compiled.

    `compiler` is PyTensor's flag ``cxx``; empty where there is none. The file has the code's name.
    Libraries, whose order counts, come last among the options. `kind` is `ctypes.PyDLL` for
    functions that are called with Python's lock.
    """
    if not compiler:
        return None
    folder = Path(config.compiledir) / "scanlib_libraries"
    whole = sha256("\n".join([compiler, *options, text]).encode()).hexdigest()[:24]
    make = partial(_compile, compiler, text, options)
    try:
        path, _ = kept(folder, f"{name}_{whole}", ".so", make)
        return kind(str(path))
    except (OSError, subprocess.CalledProcessError):
        return None


def _compile(compiler: str, text: str, options: Sequence[str]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        written, target = Path(folder) / "library.cpp", Path(folder) / "library.so"
        written.write_text(text)
        command = [compiler, "-shared", "-fPIC", "-o", str(target), str(written), *options]
        subprocess.run(command, check=True, capture_output=True)
        return target.read_bytes()
