"""The C code of loops: a call of their program."""

from __future__ import annotations

from functools import partial

from pytensor.graph.basic import Apply
from pytensor.scalar.basic import ScalarType

from scanlib.backends.handler.programs import program_of_node
from scanlib.backends.handler.thunks import C_CODE, calling_lines, make_thunk
from scanlib.kernels.compiled import program_key
from scanlib.ops.c_linker import NODE_NAME, CCode, NoCCodeError, register_c_printer
from scanlib.source_keys import source_key


@register_c_printer
def call_program(node: Apply) -> CCode:
    """Return C code that calls the program of a loop, and what makes thunks without it.

    Raises
    ------
    NoCCodeError
        If the loop has no program.
    """
    program = program_of_node(node)
    if program is None:
        raise NoCCodeError(f"{node.op} runs through perform")
    types = [variable.type for variable in node.inputs]
    inputs = [f"x{k}" for k in range(len(types))]
    outputs = [f"y{k}" for k in range(len(program.outputs))]
    given = [
        f"npy_{type.dtype} {name}" if isinstance(type, ScalarType) else f"PyArrayObject *{name}"
        for name, type in zip(inputs, types, strict=True)
    ]
    given += [f"PyArrayObject **{name}" for name in outputs]
    lines = calling_lines(program, types, inputs, outputs)
    head = f"static int {NODE_NAME}_call({', '.join(given)})"
    return CCode(
        helpers=C_CODE,
        functions="\n".join([f"{head} {{", *(f"  {line}" for line in lines), "}", ""]),
        version=(source_key(__name__), program_key(program)),
        make_thunk=partial(make_thunk, program),
    )
