"""The handler of the custom call that runs kernels, compiled with jaxlib's headers."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

import jax
import jaxlib
from pytensor.configdefaults import config

OPTIONS = ("-shared", "-fPIC", "-O2", "-std=c++17", "-w")


def load_handler() -> ctypes.CDLL | None:
    """Return the library that holds ``scanlib_handler``, None if it cannot be compiled."""
    if not config.cxx:
        return None
    text = files("scanlib.backends.cuda").joinpath("template", "handler.cpp").read_text()
    identity = "\n".join([jaxlib.__version__, str(config.cxx), *OPTIONS, text])
    folder = Path(config.compiledir) / "scanlib_xla"
    library = folder / f"scanlib_cuda_{sha256(identity.encode()).hexdigest()[:24]}.so"
    try:
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _compile(text, library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.CalledProcessError):
        return None


def _compile(text: str, library: Path) -> None:
    """Compile to a file of another name first: other processes may look for this one."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        source, target = Path(folder) / "handler.cpp", Path(folder) / "handler.so"
        source.write_text(text)
        command = [config.cxx, *OPTIONS, f"-I{jax.ffi.include_dir()}", str(source)]
        command += ["-o", str(target), "-ldl"]
        subprocess.run(command, check=True, capture_output=True)
        os.replace(target, library)
