"""The C headers that every module of PyTensor's C linker includes, compiled once.

The suite compiles thousands of small C modules, and reading the headers of Python and NumPy is
about a third of what the compiler does for each; what a debugger would want to know of them is
another part.
"""

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytensor
from pytensor.link.c.cmodule import GCC_compiler, std_include_dirs

HEADERS = """\
#if __has_include(<Python.h>) /* not where PyTensor or scanlib tries a flag */
#include <Python.h>
#include "pytensor_mod_helper.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <numpy/arrayobject.h>
#include <numpy/arrayscalars.h>
#include <numpy/npy_math.h>
#include <algorithm>
#include <vector>
#endif
"""


def use_precompiled_headers() -> None:
    """Add them to PyTensor's flags; without GCC, or where it fails, nothing changes.

    GCC leaves what it has compiled before alone where a module's options do not fit it, and reads
    the headers again.
    """
    if not pytensor.config.cxx or not sys.platform.startswith("linux"):
        return
    command = [pytensor.config.cxx, "-x", "c++-header", "-O3", "-fno-math-errno"]
    command += [*GCC_compiler.compile_args(), "-g0", "-fvisibility=hidden"]
    command += [f"-I{folder}" for folder in std_include_dirs()]
    version = subprocess.run([pytensor.config.cxx, "--version"], capture_output=True, text=True)
    if version.returncode or "Free Software Foundation" not in version.stdout:
        return
    key = sha256("\n".join([version.stdout, *command, HEADERS]).encode()).hexdigest()[:16]
    header = Path(pytensor.config.base_compiledir) / "scanlib_headers" / key / "headers.h"
    compiled = header.with_name("headers.h.gch")
    if not compiled.exists():
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(HEADERS)
        made = header.with_name(f"{os.getpid()}.gch")
        if subprocess.run([*command, header, "-o", made], capture_output=True).returncode:
            return
        os.replace(made, compiled)
    flags = f"{pytensor.config.gcc__cxxflags} -g0 -include {header}"
    pytensor.config.gcc__cxxflags = flags.strip()
