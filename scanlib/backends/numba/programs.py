"""Loops made of kernels, as functions for numba's compiled code.

What numba compiles of a loop is a call: it puts addresses, shapes and strides into the table of
`scanlib.kernels.program` and allocates the results. The kernels are no part of numba's module; they
are compiled, or loaded from disk, when the loop first runs, and asked for by their key.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.callconv import RETCODE_EXC
from numba.core.imputils import impl_ret_new_ref
from numba.extending import intrinsic
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import numba_funcify_ensure_cache

from scanlib.backends.numba.lazy import address_of, flat_types, flat_values, register_address
from scanlib.backends.numba.memory import ask_for_large_pages
from scanlib.backends.numba.vectors import fresh_array
from scanlib.kernels.compiled import compile_program
from scanlib.kernels.driver import FRAME, Runner, compiled_runner, poll_address, raise_failure
from scanlib.kernels.program import FULL, WORD, LoopProgram

VERSION = "scanlib-programs-1"

_INT = ir.IntType(64)
_BYTE = ir.IntType(8)
_BYTES = _BYTE.as_pointer()
_programs: dict[str, LoopProgram] = {}
_codes: dict[str, Any] = {}


def call_program(program: LoopProgram, key: str) -> Any:
    """Return a function, for compiled code, that takes a tuple of a loop's inputs.

    The tuple may hold them in groups, as `lazy.tuple_text` writes it.

    Parameters
    ----------
    program : LoopProgram
    key : str
        What identifies it between processes; each that runs code which calls it must register it
        like this.
    """
    _programs[key] = program
    for name in ("prepare_entry", "start_entry", "run_parts"):
        register_address(f"{key} {name}", partial(_entry, key, name))
    for place, node in enumerate(program.functions):
        register_address(f"{key} {place}", partial(_address, node))
    register_address("scanlib poll", poll_address)
    results = [
        types.Array(numba.from_dtype(np.dtype(o.type.dtype)), o.type.ndim, "C")
        for o in program.outputs
    ]
    returned = results[0] if len(results) == 1 else types.Tuple(results)

    @intrinsic
    def call(typingctx: Any, arguments: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            items = flat_values(builder, arguments, values[0])
            made = _Call(context, builder, program, key, results).write(
                flat_types(arguments), items
            )
            whole = made[0] if len(made) == 1 else context.make_tuple(builder, returned, made)
            return impl_ret_new_ref(context, builder, returned, whole)

        return returned(arguments), codegen

    return call


def runner(program: LoopProgram) -> Runner:
    """Return a function from the inputs of a loop to its outputs, for `perform`."""
    return compiled_runner(program, [_address(node) for node in program.functions])


def _entry(key: str, name: str) -> int:
    """Return the address of a function of a registered program."""
    if key not in _codes:
        _codes[key] = compile_program(_programs[key])
    return _codes[key].entries[name]


_scalar_functions: dict[Any, Any] = {}


def _address(node: Apply) -> int:
    """Return the address of PyTensor's own function for a scalar node, from numbers to one."""
    dtypes = tuple(variable.type.dtype for variable in (*node.inputs, *node.outputs))
    known = node.op, dtypes
    if known not in _scalar_functions:
        function, _ = numba_funcify_ensure_cache(node.op, node=node)
        kinds = [numba.from_dtype(np.dtype(dtype)) for dtype in dtypes]
        _scalar_functions[known] = numba.cfunc(kinds[-1](*kinds[:-1]))(
            _plain(function, len(node.inputs))
        )
    return _scalar_functions[known].address


def has_compiled_function(node: Apply) -> bool:
    """Whether PyTensor's function for a scalar node is compiled, and does not call Python."""
    return numba_funcify_ensure_cache(node.op, node=node)[1] is not None


def _plain(function: Any, count: int) -> Callable[..., Any]:
    names = ", ".join(f"x{i}" for i in range(count))
    scope = {"function": function}
    exec(f"def plain({names}):\n    return function({names})", scope)
    return scope["plain"]


def fail(key: bytes, code: int, values: bytes) -> None:
    """Raise what a code of failure of a program means; called by compiled code."""
    raise_failure(_programs[key.decode()], code, np.frombuffer(values, np.int64))


class _Call:
    """Writes the call of one program."""

    def __init__(
        self, context: Any, builder: Any, program: LoopProgram, key: str, results: list[Any]
    ) -> None:
        self.context, self.builder = context, builder
        self.program, self.key, self.results = program, key, results
        self.words = program.words
        self.table = cgutils.alloca_once(builder, ir.ArrayType(_INT, self.words.size))
        self.frame = cgutils.alloca_once(builder, ir.ArrayType(_INT, FRAME))

    def write(self, kinds: Any, values: list[Any]) -> list[Any]:
        """Write everything; return the results."""
        builder, words = self.builder, self.words
        for place, kind, value in zip(words.inputs, kinds, values, strict=True):
            self.write_input(place, kind, value)
        for place in range(len(self.program.functions)):
            self.write_word(words.functions + place, self.address(str(place)))
        poll = address_of(self.context, builder, "scanlib poll")
        builder.store(poll, self.field(self.frame, 0))
        self.fail_if(self.call("prepare_entry"), [])
        slots = [cgutils.alloca_once(builder, self.context.get_value_type(k)) for k in self.results]
        for number, slot in enumerate(slots):
            builder.store(self.allocated(number), slot)
        space = types.Array(types.uint8, 1, "C")
        if self.program.has_workspace:
            size = self.read_word(words.workspace_size)
            workspace = fresh_array(self.context, builder, space, [size])
            self.write_word(words.workspace, builder.ptrtoint(workspace.data, _INT))
        self.call("start_entry")
        code = self.call("run_parts")
        if self.program.may_be_full:
            code = self.run_until_done(code, slots)
        if self.program.has_workspace:
            self.context.nrt.decref(builder, space, workspace._getvalue())
        self.fail_if(code, slots)
        return [self.result(number, slot) for number, slot in enumerate(slots)]

    # The table

    def field(self, table: Any, place: int) -> Any:
        return self.builder.gep(table, [ir.Constant(_INT, 0), ir.Constant(_INT, place)])

    def read_word(self, place: int) -> Any:
        return self.builder.load(self.field(self.table, place))

    def write_word(self, place: int, value: Any) -> None:
        self.builder.store(value, self.field(self.table, place))

    def write_input(self, place: int, kind: Any, value: Any) -> None:
        """Write the address, the shape and the strides of an input."""
        builder, context = self.builder, self.context
        if isinstance(kind, types.Array):
            array = context.make_array(kind)(context, builder, value)
            self.write_word(place, builder.ptrtoint(array.data, _INT))
            numbers = cgutils.unpack_tuple(builder, array.shape)
            numbers += cgutils.unpack_tuple(builder, array.strides)
        else:
            memory = cgutils.alloca_once(builder, context.get_data_type(kind))
            context.pack_value(builder, kind, value, memory)
            self.write_word(place, builder.ptrtoint(memory, _INT))
            numbers = []
        for offset, number in enumerate(numbers):
            self.write_word(place + 1 + offset, number)

    # Calls

    def address(self, name: str) -> Any:
        return address_of(self.context, self.builder, f"{self.key} {name}")

    def call(self, name: str) -> Any:
        """Write the call of a kernel; return its code."""
        builder = self.builder
        kind = ir.FunctionType(_INT, [_BYTES, _BYTES]).as_pointer()
        target = builder.inttoptr(self.address(name), kind)
        places = [builder.bitcast(place, _BYTES) for place in (self.table, self.frame)]
        return builder.call(target, places)

    def fail_if(self, code: Any, slots: list[Any]) -> None:
        """Write that an error is raised where a code is not zero."""
        builder, context = self.builder, self.context
        wrong = builder.icmp_signed("!=", code, ir.Constant(_INT, 0))
        with cgutils.if_unlikely(builder, wrong):
            for kind, slot in zip(self.results, slots, strict=False):
                context.nrt.decref(builder, kind, builder.load(slot))
            failed = builder.icmp_signed(">", code, ir.Constant(_INT, 0))
            with builder.if_then(failed):
                self.raise_error(code)
            # An interruption has set its exception already.
            context.call_conv._return_errcode_raw(builder, RETCODE_EXC)

    def raise_error(self, code: Any) -> None:
        builder, context = self.builder, self.context
        python = context.get_python_api(builder)
        lock = python.gil_ensure()
        module = python.import_module(context.insert_const_string(builder.module, __name__))
        function = python.object_getattr_string(module, fail.__name__)
        text = self.key.encode()
        key = python.bytes_from_string_and_size(
            context.insert_const_bytes(builder.module, text), ir.Constant(_INT, len(text))
        )
        values = builder.bitcast(self.field(self.frame, 1), _BYTES)
        size = ir.Constant(_INT, (FRAME - 1) * WORD)
        items = [
            key,
            python.long_from_longlong(code),
            python.bytes_from_string_and_size(values, size),
        ]
        python.call_function_objargs(function, items)
        for item in (*items, function, module):
            python.decref(item)
        python.gil_release(lock)

    # Outputs

    def allocated(self, number: int) -> Any:
        """Write a new output with the dimensions in the table, and its address into the table."""
        place, kind = self.words.outputs[number], self.results[number]
        shape = [self.read_word(place + 1 + axis) for axis in range(kind.ndim)]
        array = fresh_array(self.context, self.builder, kind, shape)
        ask_for_large_pages(self.builder, array)
        self.write_word(place, self.builder.ptrtoint(array.data, _INT))
        return array._getvalue()

    def run_until_done(self, code: Any, slots: list[Any]) -> Any:
        """Write that outputs grow, and the loop goes on, as long as they are full."""
        builder = self.builder
        last = cgutils.alloca_once_value(builder, code)
        full = ir.Constant(_INT, FULL)
        blocks = [builder.append_basic_block(name) for name in ("full", "grow", "done")]
        builder.branch(blocks[0])
        builder.position_at_end(blocks[0])
        is_full = builder.icmp_signed("==", builder.load(last), full)
        builder.cbranch(is_full, blocks[1], blocks[2])
        builder.position_at_end(blocks[1])
        self.grow(slots)
        builder.store(self.call("run_parts"), last)
        builder.branch(blocks[0])
        builder.position_at_end(blocks[2])
        return builder.load(last)

    def grow(self, slots: list[Any]) -> None:
        """Write twice as many rows, at most one for each step, with the same first ones."""
        builder, words = self.builder, self.words
        self.write_word(words.begin, self.read_word(words.taken))
        steps, capacity = self.read_word(words.steps), self.read_word(words.capacity)
        twice = builder.mul(capacity, ir.Constant(_INT, 2))
        less = builder.icmp_signed("<", twice, steps)
        capacity = builder.select(less, twice, steps)
        self.write_word(words.capacity, capacity)
        for number, (output, slot) in enumerate(zip(self.program.outputs, slots, strict=True)):
            if not output.grows:
                continue
            kind, place = self.results[number], words.outputs[number]
            old = self.context.make_array(kind)(self.context, builder, builder.load(slot))
            rows = builder.add(capacity, ir.Constant(_INT, output.extra))
            self.write_word(place + 1, rows)
            builder.store(self.allocated(number), slot)
            new = self.context.make_array(kind)(self.context, builder, builder.load(slot))
            count = builder.mul(old.nitems, old.itemsize)
            pointers = [builder.bitcast(array.data, _BYTES) for array in (new, old)]
            cgutils.raw_memcpy(builder, *pointers, count, 1)
            self.context.nrt.decref(builder, kind, old._getvalue())

    def result(self, number: int, slot: Any) -> Any:
        """Return an output, or the rows of it that are the result."""
        builder, kind = self.builder, self.results[number]
        value = builder.load(slot)
        if not (self.program.may_stop and self.program.outputs[number].grows):
            return value
        array = self.context.make_array(kind)(self.context, builder, value)
        place = self.words.first_row(number)
        first, rows = self.read_word(place), self.read_word(place + 1)
        shape = cgutils.unpack_tuple(builder, array.shape)
        strides = cgutils.unpack_tuple(builder, array.strides)
        data = builder.gep(builder.bitcast(array.data, _BYTES), [builder.mul(first, strides[0])])
        array.data = builder.bitcast(data, array.data.type)
        array.shape = cgutils.pack_array(builder, [rows, *shape[1:]])
        items = rows
        for size in shape[1:]:
            items = builder.mul(items, size)
        array.nitems = items
        return array._getvalue()
