"""Loops made of kernels, as functions for numba's compiled code.

What numba compiles of a loop is a call: it puts addresses, shapes and strides into the table of
`scanlib.kernels.program` and allocates the results. The kernels are no part of numba's module; they
are compiled, or loaded from disk, when the loop first runs, and asked for by their key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from scanlib._compat.numba import RETCODE_EXC, cgutils, impl_ret_new_ref
from scanlib.backends.handler.functions import function_address
from scanlib.backends.numba.bundles import WORDS, Bundle, Group, each, new_bundle
from scanlib.backends.numba.lazy import address_of, flat_parts, register_address
from scanlib.backends.numba.memory import ask_for_large_pages
from scanlib.backends.numba.polls import poll_pointer
from scanlib.backends.numba.vectors import fresh_array
from scanlib.kernels.compiled import compile_program
from scanlib.kernels.language import ASK, FRAME, NUMBERS
from scanlib.kernels.program import FULL, WORD, LoopProgram
from scanlib.kernels.python_driver import raise_failure

_INT = ir.IntType(64)
_BYTE = ir.IntType(8)
_BYTES = _BYTE.as_pointer()
_programs: dict[str, LoopProgram] = {}
_codes: dict[str, Any] = {}


class Call(NamedTuple):
    """A function of a tuple of a loop's inputs, its key, and whether results are a bundle."""

    function: Callable[..., Any]
    key: str | None
    bundled: bool = False


def call_program(
    program: LoopProgram, key: str, otherwise: Callable[..., Any] | None = None
) -> Any:
    """Return a function, for compiled code, that takes a tuple of a loop's inputs.

    The tuple may hold them in groups, as `lazy.tuple_text` writes it, and in bundles. Several
    results are a bundle.

    Parameters
    ----------
    program : LoopProgram
    key : str
        What identifies it between processes; each that runs code which calls it must register it
        like this.
    otherwise : callable, optional
        For a program that may be unfit: runs the loop another way, with the same tuple, and returns
        arrays.
    """
    _programs[key] = program
    for name in ("prepare_entry", "start_entry", "run_parts"):
        register_address(f"{key} {name}", partial(_entry, key, name))
    for place, node in enumerate(program.functions):
        register_address(f"{key} {place}", partial(function_address, node))
    results = [
        types.Array(numba.from_dtype(np.dtype(o.type.dtype)), o.type.ndim, "C")
        for o in program.outputs
    ]
    returned = results[0] if len(results) == 1 else Bundle(results)

    @intrinsic
    def call(typingctx: Any, arguments: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            call = _Call(context, builder, program, key, returned)
            if otherwise is not None:
                kind = results[0] if len(results) == 1 else types.Tuple(results)
                call.otherwise = lambda: context.compile_internal(
                    builder, _calling(otherwise), kind(arguments), values
                )
            whole = call.write(flat_parts(builder, arguments, values[0]))
            return impl_ret_new_ref(context, builder, returned, whole)

        return returned(arguments), codegen

    return call


def _calling(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda arguments: function(arguments)


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
        self, context: Any, builder: Any, program: LoopProgram, key: str, returned: Any
    ) -> None:
        self.context, self.builder = context, builder
        self.program, self.key, self.returned = program, key, returned
        self.results = returned.kinds if isinstance(returned, Bundle) else [returned]
        self.words = program.words
        self.table = cgutils.alloca_once(builder, ir.ArrayType(_INT, self.words.size))
        self.frame = cgutils.alloca_once(builder, ir.ArrayType(_INT, FRAME))
        self.otherwise: Callable[[], Any] | None = None

    def write(self, parts: Iterable[tuple[Any, Any]]) -> Any:
        """Write everything; return the result, or a bundle of several."""
        builder, words = self.builder, self.words
        self.write_inputs(parts)
        for place in range(len(self.program.functions)):
            self.write_word(words.functions + place, self.address(str(place)))
        builder.store(poll_pointer(self.context, builder), self.field(self.frame, ASK))
        code = self.call("prepare_entry")
        if self.otherwise is None:
            self.fail_if(code)
            return self.write_run()
        unfit = builder.icmp_signed("==", code, ir.Constant(_INT, self.program.unfit))
        place = cgutils.alloca_once(builder, self.context.get_value_type(self.returned))
        with builder.if_else(unfit, likely=False) as (other, own):
            with other:
                builder.store(self.gathered(self.otherwise()), place)
            with own:
                self.fail_if(code)
                builder.store(self.write_run(), place)
        return builder.load(place)

    def gathered(self, value: Any) -> Any:
        """Write the arrays of a tuple as the result."""
        bundle = self.make_places()
        if bundle is None:
            return value
        offsets = self.returned.offsets
        for array, kind, offset in zip(
            cgutils.unpack_tuple(self.builder, value), self.results, offsets, strict=False
        ):
            self.builder.store(array, self.result_at(kind, ir.Constant(_INT, offset)))
        return bundle

    def write_run(self) -> Any:
        """Write what follows the checks; return the result, or a bundle of several."""
        builder, words = self.builder, self.words
        bundle = self.make_places()
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
        self.fail_if(code, self.only_result() if bundle is None else bundle)
        if self.program.may_stop:
            self.cut_results()
        return self.only_result() if bundle is None else bundle

    def make_places(self) -> Any:
        """Write where results are kept: a bundle, which is returned, or a place on the stack."""
        if isinstance(self.returned, Bundle):
            bundle, self.memory = new_bundle(self.context, self.builder, self.returned)
            return bundle
        memory = cgutils.alloca_once(self.builder, self.context.get_value_type(self.returned))
        self.memory = self.builder.bitcast(memory, WORDS)
        return None

    def only_result(self) -> Any:
        return self.builder.load(self.result_at(self.returned, ir.Constant(_INT, 0)))

    def result_at(self, kind: Any, offset: Any) -> Any:
        """Write the address of a result."""
        pointer = self.context.get_value_type(kind).as_pointer()
        return self.builder.bitcast(self.builder.gep(self.memory, [offset]), pointer)

    def each_result(self, numbers: Iterable[int]) -> Iterator[tuple[Any, list[Any]]]:
        """Write code for each of some results: of all of one type it is the same code.

        It gets the type and, as words, where the result is in the table and in memory, how many
        rows it has before the first step, and where the table says which rows it has.
        """
        offsets = self.returned.offsets if isinstance(self.returned, Bundle) else [0]
        alike: dict[Any, list[list[int]]] = {}
        for number in numbers:
            output, row = self.program.outputs[number], [self.words.outputs[number]]
            row += [offsets[number], output.extra]
            row.append(self.words.first_row(number) if self.program.may_stop else 0)
            alike.setdefault(self.results[number], []).append(row)
        for kind, rows in alike.items():
            with each(self.builder, rows) as row:
                yield kind, row

    # The table

    def field(self, table: Any, place: int) -> Any:
        return self.builder.gep(table, [ir.Constant(_INT, 0), ir.Constant(_INT, place)])

    def read_word(self, place: int) -> Any:
        return self.builder.load(self.field(self.table, place))

    def write_word(self, place: int, value: Any) -> None:
        self.builder.store(value, self.field(self.table, place))

    def place_at(self, place: Any, number: int = 0) -> Any:
        """Write the address of a word of the table, some words behind a computed place."""
        place = self.builder.add(place, ir.Constant(_INT, number))
        return self.builder.gep(self.table, [ir.Constant(_INT, 0), place])

    def word_at(self, place: Any, number: int = 0) -> Any:
        return self.builder.load(self.place_at(place, number))

    def write_inputs(self, parts: Iterable[tuple[Any, Any]]) -> None:
        """Write all inputs, as they come in a tuple."""
        places = list(self.words.inputs)
        table = self.builder.bitcast(self.table, WORDS)
        for kind, value in parts:
            if isinstance(kind, Group):
                count = len(kind.own_types)
                kind.write_words(self.context, self.builder, value, table, places[:count])
                del places[:count]
            else:
                self.write_input(places.pop(0), kind, value)
        assert not places

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

    def fail_if(self, code: Any, held: Any = None) -> None:
        """Write that results are given up and an error is raised where a code is not zero."""
        builder, context = self.builder, self.context
        wrong = builder.icmp_signed("!=", code, ir.Constant(_INT, 0))
        with cgutils.if_unlikely(builder, wrong):
            if held is not None:
                context.nrt.decref(builder, self.returned, held)
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
        values = builder.bitcast(self.field(self.frame, NUMBERS), _BYTES)
        size = ir.Constant(_INT, (FRAME - NUMBERS) * WORD)
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

    def allocate(self, numbers: Iterable[int]) -> None:
        """Write new outputs with the dimensions in the table, which gets their addresses."""
        for kind, (place, offset, *_) in self.each_result(numbers):
            self.allocate_one(kind, place, offset)

    def allocate_one(self, kind: Any, place: Any, offset: Any) -> None:
        builder = self.builder
        shape = [self.word_at(place, 1 + axis) for axis in range(kind.ndim)]
        array = fresh_array(self.context, builder, kind, shape)
        ask_for_large_pages(builder, array)
        builder.store(builder.ptrtoint(array.data, _INT), self.place_at(place))
        builder.store(array._getvalue(), self.result_at(kind, offset))

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
        for kind, (place, offset, extra, _) in self.each_result(self.growing):
            old = self.array_at(kind, offset)
            builder.store(builder.add(capacity, extra), self.place_at(place, 1))
            self.allocate_one(kind, place, offset)
            new = self.array_at(kind, offset)
            count = builder.mul(old.nitems, old.itemsize)
            pointers = [builder.bitcast(array.data, _BYTES) for array in (new, old)]
            cgutils.raw_memcpy(builder, *pointers, count, 1)
            self.context.nrt.decref(builder, kind, old._getvalue())

    def array_at(self, kind: Any, offset: Any) -> Any:
        value = self.builder.load(self.result_at(kind, offset))
        return self.context.make_array(kind)(self.context, self.builder, value)

    def cut_results(self) -> None:
        """Write that outputs have the rows that are the result, where the loop may have stopped."""
        builder = self.builder
        for kind, (_, offset, _, place) in self.each_result(self.growing):
            array = self.array_at(kind, offset)
            first, rows = self.word_at(place), self.word_at(place, 1)
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
            builder.store(array._getvalue(), self.result_at(kind, offset))
