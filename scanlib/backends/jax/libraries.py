"""C++ code that XLA calls: compiled with jaxlib's headers, and kept on disk."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path

import jax
import jaxlib
from pytensor.configdefaults import config

from scanlib.backends.kept_files import kept


def identity(text: str, options: Sequence[str]) -> str:
    """Return what tells the library of some code from all others, as part of a name."""
    parts = [jaxlib.__version__, str(config.cxx), *options, text]
    return sha256("\n".join(parts).encode()).hexdigest()[:24]


def load_library(name: str, text: str, options: Sequence[str]) -> ctypes.CDLL | None:
    """Return the library of some code, None if it cannot be compiled.

    Parameters
    ----------
    name : str
        Which the `identity` of the code is part of.
    text : str
        The code.
    options : sequence of str
        The compiler's; libraries, whose order counts, come last.
    """
    if not config.cxx:
        return None
    folder = Path(config.compiledir) / "scanlib_xla"
    try:
        path, _ = kept(folder, name, ".so", partial(_compile, text, options))
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.CalledProcessError):
        return None


def _compile(text: str, options: Sequence[str]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "loop.cpp", Path(folder) / "loop.so"
        source.write_text(text)
        command = [str(config.cxx), "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}"]
        command += ["-o", str(target), str(source), *options]
        subprocess.run(command, check=True, capture_output=True)
        return target.read_bytes()
