"""What tests of loops under PyTensor's JAX linker share."""

import math
import os
import re
import subprocess
import sys

import pytensor
from pytensor.raise_op import CheckAndRaise

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def compiled(inputs, outputs, mode="JAX"):
    """Return a function of JAX's mode, or one made of it."""
    return pytensor.function(inputs, outputs, mode=mode, on_unused_input="ignore")


def loop_ops(function):
    """Return scanlib's Ops in a function, without checks."""
    return [
        node.op
        for node in function.maker.fgraph.toposort()
        if type(node.op).__module__.startswith("scanlib.ops")
        and not isinstance(node.op, CheckAndRaise)
    ]


def run_on_devices(check, count=4):
    """Run a check, ``module:function``, in a process whose CPU stands for several devices."""
    module, _, name = check.partition(":")
    run_python(
        f"import jax; jax.config.update('jax_num_cpu_devices', {count})\n"
        "jax.config.update('jax_enable_x64', True)\n"
        f"from {module} import {name}; {name}()"
    )


def collectives(function, *arguments):
    """Return the collective operations of a function as XLA compiles it, and how many numbers
    each moves: a list of pairs."""
    import jax

    text = jax.jit(function).lower(*arguments).compile().as_text()
    found = []
    for line in text.splitlines():
        match = re.search(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", line)
        if match:
            shapes = re.findall(r"[a-z]+\d+\[([\d,]*)\]", match[1])
            sizes = [math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes]
            found.append((match[2], max(sizes)))
    return found


def run_python(code, **flags):
    """Run code in a process of its own."""
    flags = {"base_compiledir": pytensor.config.base_compiledir} | flags
    text = ",".join(f"{name}={value}" for name, value in flags.items())
    subprocess.run(
        [sys.executable, "-c", code], check=True, env=os.environ | {"PYTENSOR_FLAGS": text}
    )
