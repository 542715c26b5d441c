"""Loops made of kernels, as functions for numba's compiled code.

What numba compiles of a loop is a call: it puts addresses, shapes and strides into the table of
`scanlib.kernels.program` and allocates the results. The kernels are no part of numba's module; they
are compiled, or loaded from disk, when the loop first runs, and asked for by their key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from scanlib._compat.numba import RETCODE_EXC, cgutils, impl_ret_new_ref
from scanlib.backends.handler.functions import function_address
from scanlib.backends.handler.programs import registered
from scanlib.backends.numba.addresses import (
    address_of,
    bytes_object,
    call_python,
    register_address,
)
from scanlib.backends.numba.memory import fresh_array
from scanlib.backends.numba.polls import poll_pointer
from scanlib.kernels.compiled import compile_program
from scanlib.kernels.language import ASK, FRAME, FULL, NUMBERS
from scanlib.kernels.program import WORD, LoopProgram
from scanlib.kernels.progress import ASKING
from scanlib.kernels.python_driver import raise_failure

_INT = ir.IntType(64)
_BYTE = ir.IntType(8)
_BYTES = _BYTE.as_pointer()
_programs: dict[str, LoopProgram] = {}
_codes: dict[str, Any] = {}


def call_program(
    program: LoopProgram, otherwise: Callable[..., Any] | None = None
) -> tuple[Any, str]:
    """Return a function for compiled code, from the inputs of a loop to its outputs, and its key.

    Each process that runs code which calls it has to make it like this.

    Parameters
    ----------
    program : LoopProgram
    otherwise : callable, optional
        For a program that may be unfit: runs the loop another way, with the same inputs.
    """
    key = registered(program)
    _programs[key] = program
    for name in ("prepare_entry", "start_entry", "run_parts", ASKING):
        register_address(f"{key} {name}", partial(_entry, key, name))
    for place, node in enumerate(program.functions):
        register_address(f"{key} {place}", partial(function_address, node))
    results = [
        types.Array(numba.from_dtype(np.dtype(o.type.dtype)), o.type.ndim, "C")
        for o in program.outputs
    ]
    returned = results[0] if len(results) == 1 else types.Tuple(results)

    @intrinsic
    def call(typingctx: Any, *arguments: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            call = _Call(context, builder, program, key, results)
            given = cgutils.unpack_tuple(builder, values[0])
            if otherwise is not None:
                call.otherwise = lambda: context.compile_internal(
                    builder, _calling(otherwise), returned(*arguments), given
                )
            whole = call.write(arguments, given)
            return impl_ret_new_ref(context, builder, returned, whole)

        return returned(types.StarArgTuple.from_types(arguments)), codegen

    return call, f"program {key}"


def _calling(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: function(*arguments)


def _entry(key: str, name: str) -> int:
    """Return the address of a function of a registered program."""
    if key not in _codes:
        _codes[key] = compile_program(_programs[key])
    return _codes[key].entries[name]


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
        self.places = [
            cgutils.alloca_once(builder, context.get_value_type(kind)) for kind in results
        ]
        self.otherwise: Callable[[], Any] | None = None

    def write(self, kinds: Sequence[Any], values: Sequence[Any]) -> Any:
        """Write everything; return the result, or a tuple of several."""
        builder, words = self.builder, self.words
        for place, kind, value in zip(words.inputs, kinds, values, strict=True):
            self.write_input(place, kind, value)
        for place in range(len(self.program.functions)):
            self.write_word(words.functions + place, self.address(str(place)))
        told = self.program.progress
        ask = self.address(ASKING) if told else poll_pointer(self.context, builder)
        builder.store(ask, self.field(self.frame, ASK))
        code = self.call("prepare_entry")
        if self.otherwise is None:
            self.fail_if(code)
            self.write_run()
        else:
            unfit = builder.icmp_signed("==", code, ir.Constant(_INT, self.program.unfit))
            with builder.if_else(unfit, likely=False) as (other, own):
                with other:
                    self.keep(self.otherwise())
                with own:
                    self.fail_if(code)
                    self.write_run()
        return self.gathered()

    def keep(self, value: Any) -> None:
        """Write the results of another way into their places."""
        several = len(self.results) > 1
        values = cgutils.unpack_tuple(self.builder, value) if several else [value]
        for place, item in zip(self.places, values, strict=True):
            self.builder.store(item, place)

    def gathered(self) -> Any:
        values = [self.builder.load(place) for place in self.places]
        if len(values) == 1:
            return values[0]
        return self.context.make_tuple(self.builder, types.Tuple(self.results), values)

    def write_run(self) -> None:
        """Write what follows the checks."""
        builder, words = self.builder, self.words
        self.allocate(range(len(self.results)))
        space = types.Array(types.uint8, 1, "C")
        if self.program.has_workspace:
            size = self.read_word(words.workspace_size)
            workspace = fresh_array(self.context, builder, space, [size])
            self.write_word(words.workspace, builder.ptrtoint(workspace.data, _INT))
        self.call("start_entry")
        code = self.call("run_parts")
        if self.program.may_be_full:
            code = self.run_until_done(code)
        if self.program.has_workspace:
            self.context.nrt.decref(builder, space, workspace._getvalue())
        self.fail_if(code, made=True)
        if self.program.may_stop:
            self.cut_results()

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

    def fail_if(self, code: Any, made: bool = False) -> None:
        """Write that results are given up and an error is raised where a code is not zero."""
        builder, context = self.builder, self.context
        wrong = builder.icmp_signed("!=", code, ir.Constant(_INT, 0))
        with cgutils.if_unlikely(builder, wrong):
            for kind, place in zip(self.results, self.places if made else (), strict=False):
                context.nrt.decref(builder, kind, builder.load(place))
            # An interruption has set its exception already, but for one that Python was told.
            failed = builder.icmp_signed(">", code, ir.Constant(_INT, 0))
            if self.program.progress:
                unset = cgutils.is_null(builder, context.get_python_api(builder).err_occurred())
                failed = builder.or_(failed, unset)
            with builder.if_then(failed):
                self.raise_error(code)
            context.call_conv._return_errcode_raw(builder, RETCODE_EXC)

    def raise_error(self, code: Any) -> None:
        builder, context = self.builder, self.context
        python = context.get_python_api(builder)
        lock = python.gil_ensure()
        values = builder.bitcast(self.field(self.frame, NUMBERS), _BYTES)
        size = ir.Constant(_INT, (FRAME - NUMBERS) * WORD)
        items = [
            bytes_object(context, builder, self.key.encode()),
            python.long_from_longlong(code),
            python.bytes_from_string_and_size(values, size),
        ]
        call_python(context, builder, fail, items)
        python.gil_release(lock)

    # Outputs

    def allocate(self, numbers: Iterable[int]) -> None:
        """Write new outputs with the dimensions in the table, which gets their addresses."""
        builder = self.builder
        for number in numbers:
            kind, place = self.results[number], self.words.outputs[number]
            shape = [self.read_word(place + 1 + axis) for axis in range(kind.ndim)]
            array = fresh_array(self.context, builder, kind, shape)
            self.write_word(place, builder.ptrtoint(array.data, _INT))
            builder.store(array._getvalue(), self.places[number])

    def run_until_done(self, code: Any) -> Any:
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
        self.grow()
        builder.store(self.call("run_parts"), last)
        builder.branch(blocks[0])
        builder.position_at_end(blocks[2])
        return builder.load(last)

    @property
    def growing(self) -> list[int]:
        """The numbers of the outputs that have a row for each step."""
        return [number for number, out in enumerate(self.program.outputs) if out.grows]

    def grow(self) -> None:
        """Write twice as many rows, at most one for each step, with the same first ones."""
        builder, words = self.builder, self.words
        self.write_word(words.begin, self.read_word(words.taken))
        steps, capacity = self.read_word(words.steps), self.read_word(words.capacity)
        twice = builder.mul(capacity, ir.Constant(_INT, 2))
        less = builder.icmp_signed("<", twice, steps)
        capacity = builder.select(less, twice, steps)
        self.write_word(words.capacity, capacity)
        for number in self.growing:
            old = self.array(number)
            extra = ir.Constant(_INT, self.program.outputs[number].extra)
            self.write_word(words.outputs[number] + 1, builder.add(capacity, extra))
            self.allocate([number])
            new = self.array(number)
            count = builder.mul(old.nitems, old.itemsize)
            pointers = [builder.bitcast(array.data, _BYTES) for array in (new, old)]
            cgutils.raw_memcpy(builder, *pointers, count, 1)
            self.context.nrt.decref(builder, self.results[number], old._getvalue())

    def array(self, number: int) -> Any:
        value = self.builder.load(self.places[number])
        return self.context.make_array(self.results[number])(self.context, self.builder, value)

    def cut_results(self) -> None:
        """Write that outputs have the rows that are the result, where the loop may have stopped."""
        builder = self.builder
        for number in self.growing:
            array, place = self.array(number), self.words.first_row(number)
            first, rows = self.read_word(place), self.read_word(place + 1)
            shape = cgutils.unpack_tuple(builder, array.shape)
            strides = cgutils.unpack_tuple(builder, array.strides)
            start = builder.mul(first, strides[0])
            data = builder.gep(builder.bitcast(array.data, _BYTES), [start])
            array.data = builder.bitcast(data, array.data.type)
            array.shape = cgutils.pack_array(builder, [rows, *shape[1:]])
            items = rows
            for size in shape[1:]:
                items = builder.mul(items, size)
            array.nitems = items
            builder.store(array._getvalue(), self.places[number])
