"""What tests of loops under PyTensor's JAX linker share."""

import os
import subprocess
import sys

import pytensor


def compiled(inputs, outputs, mode="JAX"):
    """Return a function of JAX's mode, or one made of it."""
    return pytensor.function(inputs, outputs, mode=mode, on_unused_input="ignore")


def loop_ops(function):
    """Return scanlib's Ops in a function."""
    return [
        node.op
        for node in function.maker.fgraph.toposort()
        if type(node.op).__module__.startswith("scanlib.ops")
    ]


def run_python(code, **flags):
    """Run code in a process of its own."""
    flags = {"base_compiledir": pytensor.config.base_compiledir} | flags
    text = ",".join(f"{name}={value}" for name, value in flags.items())
    subprocess.run(
        [sys.executable, "-c", code], check=True, env=os.environ | {"PYTENSOR_FLAGS": text}
    )
