"""Many arrays as one value of compiled code.

A loop of 500 states returns 500 arrays. As variables of numba's each is several statements, with
types to find and references to count, and a tuple of all is copied whole wherever one is taken out
of it. A bundle is one pointer to memory that holds the arrays, and its type says what they are:

    values = loop(…)                     500 arrays
    rows = picked(values)                views of some of them, by a plan known beforehand
    other_loop((x, rows, a))             takes them as so many arguments
    a = taken(values)                    one of them, where something wants an array

Picking costs nothing: it makes another type of the same pointer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_model

from scanlib._compat.numba import cgutils, impl_ret_borrowed, impl_ret_new_ref, models
from scanlib.source_keys import source_key

VERSION = source_key(__name__)

Rows = tuple[int, int | None, int | None]
"""The number of an array in memory, and the ends of a slice along its first axis."""

_WORD = ir.IntType(64)
WORDS = _WORD.as_pointer()
_BYTES = ir.IntType(8).as_pointer()
_HEAD = 5  # words of an array before its shape: owner, parent, items, size of one, address
_DATA = 4


class Group(types.Type):
    """The type of what stands for several arrays in a tuple of arguments."""

    own_types: Sequence[types.Array]

    def arrays(self, context: Any, builder: Any, value: Any) -> list[Any]:
        """Write the arrays; the references stay with the group."""
        raise NotImplementedError

    def write_words(
        self, context: Any, builder: Any, value: Any, table: Any, places: Sequence[int]
    ) -> None:
        """Write address, shape and strides of each array to places in a table of words."""
        raise NotImplementedError


class Constants(Group):
    """The type of small arrays that are constants: it holds them all.

    Parameters
    ----------
    values : sequence of np.ndarray
    """

    def __init__(self, values: Sequence[np.ndarray]) -> None:
        self.values = [np.ascontiguousarray(value) for value in values]
        self.own_types = [
            types.Array(numba.from_dtype(value.dtype), value.ndim, "C", readonly=True)
            for value in values
        ]
        super().__init__(name=f"Constants({len(values)} {digest_of(values)})")

    def arrays(self, context: Any, builder: Any, value: Any) -> list[Any]:
        return [
            context.make_constant_array(builder, kind, own)
            for kind, own in zip(self.own_types, self.values, strict=True)
        ]

    def write_words(
        self, context: Any, builder: Any, value: Any, table: Any, places: Sequence[int]
    ) -> None:
        offsets = [0]
        for own in self.values:
            offsets.append(offsets[-1] + -(-own.nbytes // 8) * 8)
        data = b"".join(own.tobytes().ljust(-(-own.nbytes // 8) * 8, b"\0") for own in self.values)
        numbers = np.frombuffer(data, np.int64).tolist()
        start = builder.ptrtoint(_constant_words(builder, numbers), _WORD)
        rows: dict[int, list[list[int]]] = {}
        for own, place, offset in zip(self.values, places, offsets, strict=False):
            rows.setdefault(own.ndim, []).append([place, offset, *own.shape, *own.strides])
        for row in rows.values():
            with each(builder, row) as (place, offset, *sizes):
                target = builder.gep(table, [place])
                for number, word in enumerate([builder.add(start, offset), *sizes]):
                    builder.store(word, builder.gep(target, [ir.Constant(_WORD, number)]))


register_model(Constants)(models.OpaqueModel)


def digest_of(values: Sequence[np.ndarray]) -> str:
    """Return what identifies arrays between processes."""
    words = [(value.dtype.str, value.shape, value.tobytes()) for value in values]
    return sha256(repr(words).encode()).hexdigest()[:32]


class Bundle(Group):
    """The type of arrays in memory.

    Parameters
    ----------
    kinds : sequence of types.Array
        What lies in memory.
    rows : sequence of Rows, optional
        What the bundle has of it; all arrays by default.
    """

    def __init__(self, kinds: Sequence[types.Array], rows: Sequence[Rows] | None = None) -> None:
        self.kinds = tuple(kinds)
        whole = [(place, None, None) for place in range(len(self.kinds))]
        self.rows = tuple(whole if rows is None else rows)
        self.own_types = [self.kinds[place] for place, _, _ in self.rows]
        self.offsets = [0]
        for kind in self.kinds:
            self.offsets.append(self.offsets[-1] + _HEAD + 2 * kind.ndim)
        # Names of functions have the names of types in them.
        words = sha256(f"{[str(kind) for kind in self.kinds]}{self.rows}".encode()).hexdigest()
        super().__init__(name=f"Bundle({len(self.rows)} {words[:32]})")

    def arrays(self, context: Any, builder: Any, value: Any) -> list[Any]:
        found = slots(context, builder, self, value)
        return [
            load_rows(context, builder, own, slot, rows)
            for own, (slot, rows) in zip(self.own_types, found, strict=True)
        ]

    def write_words(
        self, context: Any, builder: Any, value: Any, table: Any, places: Sequence[int]
    ) -> None:
        data = builder.bitcast(context.nrt.meminfo_data(builder, value), WORDS)
        alike: dict[Any, list[list[int]]] = {}
        for own, rows, place in zip(self.own_types, self.rows, places, strict=True):
            numbers = [self.offsets[rows[0]], place]
            alike.setdefault((own.ndim, rows[1:]), []).append(numbers)
        for (ndim, ends), row in alike.items():
            with each(builder, row) as (offset, place):
                slot, target = builder.gep(data, [offset]), builder.gep(table, [place])
                numbers = [_word(builder, slot, k) for k in range(_DATA, _HEAD + 2 * ndim)]
                if ends != (None, None):
                    numbers[:2] = _cut(builder, slot, ndim, (0, *ends))
                for number, word in enumerate(numbers):
                    builder.store(word, builder.gep(target, [ir.Constant(_WORD, number)]))


@register_model(Bundle)
class _BundleModel(models.OpaqueModel):
    def has_nrt_meminfo(self) -> bool:
        return True

    def get_nrt_meminfo(self, builder: Any, value: Any) -> Any:
        return value


# Compiled code


@contextmanager
def each(builder: Any, rows: Sequence[Sequence[int]]) -> Iterator[list[Any]]:
    """Write code that runs for each of some rows of integers; it gets the row.

    The code is as long for 500 rows as for one.
    """
    if len(rows) == 1:
        yield [ir.Constant(_WORD, number) for number in rows[0]]
        return
    width = len(rows[0])
    table = _constant_words(builder, [number for row in rows for number in row])
    with cgutils.for_range(builder, ir.Constant(_WORD, len(rows))) as loop:
        first = builder.gep(table, [builder.mul(loop.index, ir.Constant(_WORD, width))])
        yield [_word(builder, first, number) for number in range(width)]


def _constant_words(builder: Any, numbers: Sequence[int]) -> Any:
    """Return the address of integers in constant memory."""
    words = ir.Constant(ir.ArrayType(_WORD, len(numbers)), list(numbers))
    table = cgutils.global_constant(builder.module, "scanlib_words", words)
    return builder.bitcast(table, WORDS)


def new_bundle(context: Any, builder: Any, kind: Bundle) -> tuple[Any, Any]:
    """Write a bundle whose arrays are not set yet; return it and where they go, as words."""
    size = ir.Constant(_WORD, kind.offsets[-1] * 8)
    value = context.nrt.meminfo_alloc_dtor(builder, size, _releasing(context, builder, kind))
    data = context.nrt.meminfo_data(builder, value)
    cgutils.memset(builder, data, size, 0)
    return value, builder.bitcast(data, WORDS)


def _releasing(context: Any, builder: Any, kind: Bundle) -> Any:
    """Return the function that gives up the arrays of a bundle."""
    module = builder.module
    name = f"scanlib_release_{kind.name[7:-1].replace(' ', '_')}"
    function = module.globals.get(name)
    if function is not None:
        return function
    void = ir.VoidType()
    function = ir.Function(module, ir.FunctionType(void, [_BYTES, _WORD, _BYTES]), name)
    function.linkage = "internal"
    inside = ir.IRBuilder(function.append_basic_block("entry"))
    release = cgutils.get_or_insert_function(module, ir.FunctionType(void, [_BYTES]), "NRT_decref")
    words = inside.bitcast(function.args[0], WORDS)
    with each(inside, [[offset] for offset in kind.offsets[:-1]]) as (offset,):
        owner = inside.load(inside.gep(words, [offset]))
        inside.call(release, [inside.inttoptr(owner, _BYTES)])
    inside.ret_void()
    return function


def _slot(builder: Any, data: Any, offset: int) -> Any:
    words = builder.bitcast(data, WORDS)
    return builder.gep(words, [ir.Constant(_WORD, offset)])


def slots(context: Any, builder: Any, kind: Bundle, value: Any) -> list[tuple[Any, Rows]]:
    """Return where each array of a bundle lies, as words, and which rows of it are meant."""
    data = context.nrt.meminfo_data(builder, value)
    return [(_slot(builder, data, kind.offsets[rows[0]]), rows) for rows in kind.rows]


def _word(builder: Any, slot: Any, number: int) -> Any:
    return builder.load(builder.gep(slot, [ir.Constant(_WORD, number)]))


def _cut(builder: Any, slot: Any, ndim: int, rows: Rows) -> tuple[Any, Any]:
    """Write the address and the length of some rows of an array."""
    _, start, stop = rows
    address, length = _word(builder, slot, _DATA), _word(builder, slot, _HEAD)

    def end(number: int | None, otherwise: Any) -> Any:
        if number is None:
            return otherwise
        if number < 0:
            place = builder.add(length, ir.Constant(_WORD, number))
            below = builder.icmp_signed("<", place, ir.Constant(_WORD, 0))
            return builder.select(below, ir.Constant(_WORD, 0), place)
        place = ir.Constant(_WORD, number)
        return builder.select(builder.icmp_signed("<", place, length), place, length)

    first, last = end(start, ir.Constant(_WORD, 0)), end(stop, length)
    stride = _word(builder, slot, _HEAD + ndim)
    count = builder.sub(last, first)
    none = builder.icmp_signed("<", count, ir.Constant(_WORD, 0))
    count = builder.select(none, ir.Constant(_WORD, 0), count)
    return builder.add(address, builder.mul(first, stride)), count


def load_rows(context: Any, builder: Any, kind: types.Array, slot: Any, rows: Rows) -> Any:
    """Write an array that has rows of one in memory; the reference is the bundle's."""
    pointer = builder.bitcast(slot, context.get_value_type(kind).as_pointer())
    value = builder.load(pointer)
    if rows[1:] == (None, None):
        return value
    array = context.make_array(kind)(context, builder, value)
    address, count = _cut(builder, slot, kind.ndim, rows)
    array.data = builder.inttoptr(address, array.data.type)
    sizes = [count, *cgutils.unpack_tuple(builder, array.shape)[1:]]
    array.shape = cgutils.pack_array(builder, sizes)
    items = sizes[0]
    for size in sizes[1:]:
        items = builder.mul(items, size)
    array.nitems = items
    return array._getvalue()


def _hold(context: Any, builder: Any, kind: types.Array, value: Any) -> None:
    """Write that an array is held once more.

    Numba would drop this together with the end of the new reference, as though nothing between
    could end the bundle's.
    """
    module = builder.module
    function = module.globals.get("scanlib_hold")
    plain = ir.FunctionType(ir.VoidType(), [_BYTES])
    if function is None:
        function = ir.Function(module, plain, "scanlib_hold")
        function.linkage = "internal"
        function.attributes.add("noinline")
        inside = ir.IRBuilder(function.append_basic_block("entry"))
        incref = cgutils.get_or_insert_function(module, plain, "NRT_incref")
        inside.call(incref, list(function.args))
        inside.ret_void()
    for _, owner in context.nrt.get_meminfos(builder, kind, value):
        builder.call(function, [owner])


# Functions of compiled code


def picking(rows: Sequence[Rows]) -> Any:
    """Return a function that gives a bundle with rows of some arrays of one that has all."""

    @intrinsic
    def picked(typingctx: Any, bundle: Any) -> Any:
        known = Bundle(bundle.kinds, rows)

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return impl_ret_borrowed(context, builder, known, arguments[0])

        return known(bundle), codegen

    return picked


def taking(rows: Rows) -> Any:
    """Return a function that gives rows of one array of a bundle."""

    @intrinsic
    def taken(typingctx: Any, bundle: Any) -> Any:
        known = bundle.kinds[rows[0]]

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            picked = Bundle(bundle.kinds, [rows])
            (array,) = picked.arrays(context, builder, arguments[0])
            _hold(context, builder, known, array)
            return impl_ret_new_ref(context, builder, known, array)

        return known(bundle), codegen

    return taken


def reading(place: int) -> Any:
    """Return a function that gives the number in an array of a bundle without axes."""

    @intrinsic
    def number_in(typingctx: Any, bundle: Any) -> Any:
        known = bundle.kinds[place]

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            picked = Bundle(bundle.kinds, [(place, None, None)])
            ((slot, _),) = slots(context, builder, picked, arguments[0])
            address = _word(builder, slot, _DATA)
            pointer = builder.inttoptr(address, context.get_data_type(known.dtype).as_pointer())
            return context.unpack_value(builder, known.dtype, pointer)

        return known.dtype(bundle), codegen

    return number_in


def constants(values: Sequence[np.ndarray]) -> Any:
    """Return a function that gives small arrays, as arguments."""

    @intrinsic
    def given(typingctx: Any) -> Any:
        known = Constants(values)
        return known(), lambda context, builder, signature, arguments: context.get_dummy_value()

    return given


@intrinsic
def as_arrays(typingctx: Any, bundle: Any) -> Any:
    """Return the arrays of a bundle as a tuple (compiled code only)."""
    known = types.Tuple(bundle.own_types)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        arrays = bundle.arrays(context, builder, arguments[0])
        for own, array in zip(bundle.own_types, arrays, strict=True):
            _hold(context, builder, own, array)
        whole = context.make_tuple(builder, known, arrays)
        return impl_ret_new_ref(context, builder, known, whole)

    return known(bundle), codegen
