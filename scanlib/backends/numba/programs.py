"""Programs of kernels, as functions for code that numba compiles.

What numba compiles of a program is a call: it puts addresses, shapes and strides into the table of
`scanlib.kernels.program` and allocates the results. The kernels are no part of numba's module; they
are compiled, or loaded from disk, when the program first runs, and asked for by their key.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from scanlib._compat.numba import RETCODE_EXC, cgutils, impl_ret_new_ref
from scanlib.backends.handler.functions import function_address
from scanlib.backends.handler.programs import registered
from scanlib.backends.numba.callbacks import (
    BYTES,
    WORD,
    address_of,
    raise_from,
    register_address,
    register_failure,
)
from scanlib.backends.numba.memory import fresh_array
from scanlib.kernels.compiled import compile_program
from scanlib.kernels.language import ASK, FRAME, FULL, NUMBERS
from scanlib.kernels.program import LoopProgram
from scanlib.kernels.progress import ASKING
from scanlib.kernels.python_driver import raise_failure
from scanlib.source_keys import source_key

_codes: dict[str, Any] = {}


def call_program(
    program: LoopProgram, otherwise: Any = None, numbers: bool = False
) -> tuple[Any, str]:
    """Return a function for compiled code from a program's inputs to its outputs, and its key.

    Each process that runs code which calls it has to make it like this. Where the program is unfit,
    compiled code calls `otherwise` with the same inputs. An output of no axes is an array, or a
    number if `numbers` are wanted.
    """
    key = registered(program)
    register_failure(key, partial(_fail, program))
    for name in ("prepare_entry", "start_entry", "run_parts", ASKING):
        register_address(f"{key} {name}", partial(_entry, key, program, name))
    for place, node in enumerate(program.functions):
        register_address(f"{key} {place}", partial(function_address, node))
    results = []
    for output in program.outputs:
        kind, ndim = numba.from_dtype(np.dtype(output.type.dtype)), output.type.ndim
        results.append(kind if numbers and ndim == 0 else types.Array(kind, ndim, "C"))
    returned = results[0] if len(results) == 1 else types.Tuple(results)

    @intrinsic
    def call(typingctx: Any, *arguments: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            call = _Call(context, builder, program, key, results)
            given = cgutils.unpack_tuple(builder, values[0])
            code = call.prepare(arguments, given)
            if otherwise is None:
                call.run(code)
            else:
                unfit = builder.icmp_signed("==", code, ir.Constant(WORD, program.unfit))
                with builder.if_else(unfit, likely=False) as (other, own):
                    with other:
                        kind = types.Dispatcher(otherwise)
                        walks = kind.get_call_type(context.typing_context, arguments, {})
                        whole = context.get_function(kind, walks)(builder, given)
                        whole = context.cast(builder, whole, walks.return_type, returned)
                        several = cgutils.unpack_tuple(builder, whole) if call.several else [whole]
                        for place, item in zip(call.places, several, strict=True):
                            builder.store(item, place)
                    with own:
                        call.run(code)
            made = [call.result(number) for number in range(len(results))]
            whole = context.make_tuple(builder, returned, made) if call.several else made[0]
            return impl_ret_new_ref(context, builder, returned, whole)

        return returned(types.StarArgTuple.from_types(arguments)), codegen

    identity = f"{source_key(__name__)} {key} {numbers}"
    return call, sha256(identity.encode()).hexdigest()  # part of the names of files


def _entry(key: str, program: LoopProgram, name: str) -> int:
    """Return the address of a function of a registered program."""
    if key not in _codes:
        _codes[key] = compile_program(program)
    return _codes[key].entries[name]


def _fail(program: LoopProgram, code: int, *frame: int) -> None:
    """Raise what a code of failure means; it stands in the first word of the frame."""
    raise_failure(program, code, np.array(frame[NUMBERS - 1 :], np.int64))


class _Call:
    """Writes the call of one program."""

    def __init__(
        self, context: Any, builder: Any, program: LoopProgram, key: str, results: list[Any]
    ) -> None:
        self.context, self.builder, self.program, self.key = context, builder, program, key
        self.words, self.results = program.words, results
        self.table = cgutils.alloca_once(builder, ir.ArrayType(WORD, self.words.size))
        self.frame = cgutils.alloca_once(builder, ir.ArrayType(WORD, FRAME))
        self.places = [
            cgutils.alloca_once(
                builder,
                context.get_value_type(kind)
                if isinstance(kind, types.Array)
                else context.get_data_type(kind),
            )
            for kind in results
        ]

    @property
    def several(self) -> bool:
        return len(self.results) > 1

    def prepare(self, kinds: Sequence[Any], values: Sequence[Any]) -> Any:
        """Write what fills in the table; return the code of `prepare`."""
        builder, program, words = self.builder, self.program, self.words
        dtypes = [numba.from_dtype(np.dtype(given.dtype)) for given in program.inputs]
        for given in zip(words.inputs, kinds, values, dtypes, strict=True):
            self.write_input(*given)
        for place in range(len(program.functions)):
            self.write_word(words.functions + place, self.address(str(place)))
        told = program.progress
        ask = self.address(ASKING) if told else address_of(self.context, builder, "poll")
        builder.store(ask, self.field(self.frame, ASK))
        return self.call("prepare_entry")

    def run(self, code: Any) -> None:
        """Write everything that follows `prepare`; the results are in `places`."""
        builder, program, words = self.builder, self.program, self.words
        self.fail_if(code)
        for number in range(len(self.results)):
            self.allocate(number)
        if program.has_workspace:
            space, size = types.Array(types.uint8, 1, "C"), self.read_word(words.workspace_size)
            workspace = fresh_array(self.context, builder, space, [size])
            self.write_word(words.workspace, builder.ptrtoint(workspace.data, WORD))
        self.call("start_entry")
        code = self.call("run_parts")
        if program.may_be_full:
            code = self.run_until_done(code)
        if program.has_workspace:
            self.context.nrt.decref(builder, space, workspace._getvalue())
        self.fail_if(code, made=True)
        if program.may_stop:
            self.cut_results()

    # The table

    def field(self, table: Any, place: int) -> Any:
        return self.builder.gep(table, [ir.Constant(WORD, 0), ir.Constant(WORD, place)])

    def read_word(self, place: int) -> Any:
        return self.builder.load(self.field(self.table, place))

    def write_word(self, place: int, value: Any) -> None:
        self.builder.store(value, self.field(self.table, place))

    def write_input(self, place: int, kind: Any, value: Any, wanted: Any) -> None:
        """Write the address, the shape and the strides of an input.

        Numbers are of the `wanted` type; PyTensor's functions return 0-d arrays of others.
        """
        builder, context, numbers = self.builder, self.context, []
        if isinstance(kind, types.Array):
            array = context.make_array(kind)(context, builder, value)
            memory = array.data
            numbers += cgutils.unpack_tuple(builder, array.shape)
            numbers += cgutils.unpack_tuple(builder, array.strides)
            if kind.ndim == 0 and kind.dtype != wanted:
                kind, value = kind.dtype, context.unpack_value(builder, kind.dtype, memory)
        if not isinstance(kind, types.Array):
            memory = cgutils.alloca_once(builder, context.get_data_type(wanted))
            context.pack_value(builder, wanted, context.cast(builder, value, kind, wanted), memory)
        for offset, number in enumerate([builder.ptrtoint(memory, WORD), *numbers]):
            self.write_word(place + offset, number)

    # Calls

    def address(self, name: str) -> Any:
        return address_of(self.context, self.builder, f"{self.key} {name}")

    def call(self, name: str) -> Any:
        """Write the call of a kernel; return its code."""
        kind = ir.FunctionType(WORD, [BYTES, BYTES]).as_pointer()
        target = self.builder.inttoptr(self.address(name), kind)
        places = [self.builder.bitcast(place, BYTES) for place in (self.table, self.frame)]
        return self.builder.call(target, places)

    def fail_if(self, code: Any, made: bool = False) -> None:
        """Write that results are given up and an error is raised where a code is not zero."""
        builder, context = self.builder, self.context
        wrong = builder.icmp_signed("!=", code, ir.Constant(WORD, 0))
        with cgutils.if_unlikely(builder, wrong):
            for kind, place in zip(self.results, self.places if made else (), strict=False):
                if isinstance(kind, types.Array):
                    context.nrt.decref(builder, kind, builder.load(place))
            # An interruption has set its exception already, but for one that Python was told.
            failed = builder.icmp_signed(">", code, ir.Constant(WORD, 0))
            if self.program.progress:
                unset = cgutils.is_null(builder, context.get_python_api(builder).err_occurred())
                failed = builder.or_(failed, unset)
            with builder.if_then(failed):
                builder.store(code, self.field(self.frame, 0))
                raise_from(context, builder, self.key, self.frame, FRAME)
            context.call_conv._return_errcode_raw(builder, RETCODE_EXC)

    # Outputs

    def allocate(self, number: int) -> None:
        """Write a new output with the dimensions in the table, which gets its address."""
        builder, kind, place = self.builder, self.results[number], self.words.outputs[number]
        if not isinstance(kind, types.Array):
            self.write_word(place, builder.ptrtoint(self.places[number], WORD))
            return
        shape = [self.read_word(place + 1 + axis) for axis in range(kind.ndim)]
        array = fresh_array(self.context, builder, kind, shape)
        self.write_word(place, builder.ptrtoint(array.data, WORD))
        builder.store(array._getvalue(), self.places[number])

    def result(self, number: int) -> Any:
        kind, place = self.results[number], self.places[number]
        if isinstance(kind, types.Array):
            return self.builder.load(place)
        return self.context.unpack_value(self.builder, kind, place)

    def array(self, number: int) -> Any:
        value = self.builder.load(self.places[number])
        return self.context.make_array(self.results[number])(self.context, self.builder, value)

    @property
    def growing(self) -> list[int]:
        """The numbers of the outputs that have a row for each step."""
        return [number for number, out in enumerate(self.program.outputs) if out.grows]

    def run_until_done(self, code: Any) -> Any:
        """Write that outputs grow, and the loop goes on, as long as they are full."""
        builder, last = self.builder, cgutils.alloca_once_value(self.builder, code)
        test, grow, done = (builder.append_basic_block(name) for name in ("test", "grow", "done"))
        builder.branch(test)
        builder.position_at_end(test)
        full = builder.icmp_signed("==", builder.load(last), ir.Constant(WORD, FULL))
        builder.cbranch(full, grow, done)
        builder.position_at_end(grow)
        self.grow()
        builder.store(self.call("run_parts"), last)
        builder.branch(test)
        builder.position_at_end(done)
        return builder.load(last)

    def grow(self) -> None:
        """Write twice as many rows, at most one for each step, with the same first ones."""
        builder, words = self.builder, self.words
        self.write_word(words.begin, self.read_word(words.taken))
        steps, capacity = self.read_word(words.steps), self.read_word(words.capacity)
        twice = builder.mul(capacity, ir.Constant(WORD, 2))
        capacity = builder.select(builder.icmp_signed("<", twice, steps), twice, steps)
        self.write_word(words.capacity, capacity)
        for number in self.growing:
            old, extra = self.array(number), ir.Constant(WORD, self.program.outputs[number].extra)
            self.write_word(words.outputs[number] + 1, builder.add(capacity, extra))
            self.allocate(number)
            ends = [builder.bitcast(a.data, BYTES) for a in (self.array(number), old)]
            cgutils.raw_memcpy(builder, *ends, builder.mul(old.nitems, old.itemsize), 1)
            self.context.nrt.decref(builder, self.results[number], old._getvalue())

    def cut_results(self) -> None:
        """Write that outputs have the rows that are the result, where the loop may have stopped."""
        builder = self.builder
        for number in self.growing:
            array, place = self.array(number), self.words.first_row(number)
            first, rows = self.read_word(place), self.read_word(place + 1)
            shape = cgutils.unpack_tuple(builder, array.shape)
            strides = cgutils.unpack_tuple(builder, array.strides)
            start = builder.gep(
                builder.bitcast(array.data, BYTES), [builder.mul(first, strides[0])]
            )
            array.data = builder.bitcast(start, array.data.type)
            array.shape = cgutils.pack_array(builder, [rows, *shape[1:]])
            array.nitems = rows
            for size in shape[1:]:
                array.nitems = builder.mul(array.nitems, size)
            builder.store(array._getvalue(), self.places[number])
