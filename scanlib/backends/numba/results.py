"""What a compiled function hands to Python: arrays, made with little work.

Numba gives Python an array as a view of its own memory, behind an object that owns it. Making both
takes a third of a microsecond, for a few numbers longer than to compute them. Small arrays are
copied into memory of NumPy's own instead, in a third of that time.

Compiled code that calls such a function gets a tuple of arrays, as of any other, where there are no
more than `graph.FEW_RESULTS`; of more, it gets bundles.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import box, intrinsic, register_model
from numpy._core import multiarray

from scanlib._compat.numba import cgutils, impl_ret_borrowed, models, numpy_support
from scanlib.backends.numba.bundles import WORDS, Bundle, each, load_rows
from scanlib.backends.numba.lazy import flat_parts, flat_types
from scanlib.source_keys import source_key

RESULTS_VERSION = source_key(__name__)
SMALL = 1024  # bytes up to which an array is copied
# Places in NumPy's table of functions for other libraries.
_TABLE = {"scanlib_ndarray": 2, "scanlib_new_ndarray": 94}
_DATA = object.__basicsize__  # where an array has the address of its items
_CODE = ir.IntType(32)


def _register_symbols() -> None:
    """Let compiled code, also that of earlier processes, find NumPy's functions by name."""
    find = ctypes.pythonapi.PyCapsule_GetPointer
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    table = ctypes.cast(find(multiarray._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p))
    for name, place in _TABLE.items():
        llvmlite.binding.add_symbol(name, table[place])


_register_symbols()


class Results(types.Tuple):
    """The type of the results of a function that Python calls, in groups and bundles."""

    def __new__(cls, kinds: tuple[Any, ...]) -> Results:
        return object.__new__(cls)


register_model(Results)(models.TupleModel)


@intrinsic
def as_results(typingctx: Any, together: Any) -> Any:
    """Return a tuple that `lazy.tuple_text` wrote as one that Python takes quickly.

    Python gets it flat (compiled code only).
    """
    known = Results(tuple(together))

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        items = cgutils.unpack_tuple(builder, arguments[0])
        result = context.make_tuple(builder, known, items)
        return impl_ret_borrowed(context, builder, known, result)

    return known(together), codegen


@box(Results)
def _box_results(known: Results, value: Any, c: Any) -> Any:
    builder, pyapi = c.builder, c.pyapi
    items = pyapi.tuple_new(len(flat_types(known)))
    failed = cgutils.alloca_once_value(builder, cgutils.false_bit)
    for number, object_ in _boxed(known, value, c):
        missing = cgutils.is_null(builder, object_)
        builder.store(builder.or_(builder.load(failed), missing), failed)
        _set_item(pyapi, items, number, object_)
    result = cgutils.alloca_once_value(builder, items)
    with builder.if_then(builder.load(failed), likely=False):
        pyapi.decref(items)
        builder.store(ir.Constant(pyapi.pyobj, None), result)
    return builder.load(result)


def _set_item(pyapi: Any, items: Any, number: Any, item: Any) -> None:
    """Write that a new tuple has an item; the reference becomes the tuple's."""
    kind = ir.FunctionType(ir.IntType(32), [pyapi.pyobj, pyapi.py_ssize_t, pyapi.pyobj])
    function = cgutils.get_or_insert_function(pyapi.module, kind, "PyTuple_SetItem")
    pyapi.builder.call(function, [items, number, item])


def _boxed(known: Results, value: Any, c: Any) -> Iterator[tuple[Any, Any]]:
    """Write each result as an object of Python; yield its number and the object."""
    builder, nrt = c.builder, c.context.nrt
    dtypes = {}
    for kind in flat_types(known):
        if isinstance(kind, types.Array) and kind.dtype not in dtypes:
            dtype = numpy_support.as_dtype(kind.dtype)
            dtypes[kind.dtype] = c.env_manager.read_const(c.env_manager.add_const(dtype))

    def copied(kind: types.Array, slot: Any, ends: Any) -> Any:
        return builder.call(_copying(kind, ends, c), [slot, dtypes[kind.dtype]])

    first = 0
    for kind, item in flat_parts(builder, known, value):
        word = ir.Constant(ir.IntType(64), first)
        if isinstance(kind, Bundle):
            memory = builder.bitcast(nrt.meminfo_data(builder, item), WORDS)
            alike: dict[Any, list[list[int]]] = {}
            for number, (own, rows) in enumerate(
                zip(kind.own_types, kind.rows, strict=True), first
            ):
                alike.setdefault((own, rows[1:]), []).append([number, kind.offsets[rows[0]]])
            for (own, ends), numbers in alike.items():
                with each(builder, numbers) as (number, offset):
                    yield number, copied(own, builder.gep(memory, [offset]), ends)
            nrt.decref(builder, kind, item)
            first += len(kind.rows)
            continue
        first += 1
        if isinstance(kind, types.Array) and kind.layout == "C" and kind.mutable:
            slot = builder.bitcast(cgutils.alloca_once_value(builder, item), WORDS)
            yield word, copied(kind, slot, (None, None))
            nrt.decref(builder, kind, item)
        else:
            yield word, c.box(kind, item)


def _copying(kind: types.Array, ends: Any, c: Any) -> Any:
    """Return a function that makes an object of rows of an array in memory.

    It is a copy, or numba's view if it is large or Python's already.
    """
    module, pyobj = c.builder.module, c.pyapi.pyobj
    words = sha256(f"{kind}{ends}".encode()).hexdigest()[:16]
    name = f"scanlib_object_{words}"
    function = module.globals.get(name)
    if function is not None:
        return function
    function = ir.Function(module, ir.FunctionType(pyobj, [WORDS, pyobj]), name)
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    slot, dtype = function.args
    item = load_rows(c.context, builder, kind, slot, (0, *ends))
    builder.ret(_copied(kind, item, dtype, c.context, builder))
    return function


def _copied(kind: types.Array, item: Any, dtype: Any, context: Any, builder: Any) -> Any:
    """Write a copy of an array, or numba's view of it if it is large or Python's already."""
    pyapi = context.get_python_api(builder)
    array = context.make_array(kind)(context, builder, item)
    size = builder.mul(array.nitems, array.itemsize)
    small = builder.icmp_signed("<=", size, ir.Constant(size.type, SMALL))
    fresh = builder.and_(small, cgutils.is_null(builder, array.parent))
    result = cgutils.alloca_once(builder, pyapi.pyobj)
    with builder.if_else(fresh, likely=True) as (copying, viewing):
        with copying:
            copy = _new_array(kind, array, dtype, pyapi)
            builder.store(copy, result)
            with builder.if_then(cgutils.is_not_null(builder, copy), likely=True):
                place = builder.gep(copy, [ir.Constant(_CODE, _DATA)])
                data = builder.load(builder.bitcast(place, cgutils.voidptr_t.as_pointer()))
                cgutils.raw_memcpy(builder, data, array.data, size, 1)
        with viewing:
            builder.store(pyapi.nrt_adapt_ndarray_to_python(kind, item, dtype), result)
    return builder.load(result)


def _new_array(kind: types.Array, array: Any, dtype: Any, pyapi: Any) -> Any:
    """Write a call that makes an array of NumPy's own, of the shape of another."""
    builder = pyapi.builder
    word, pointer = array.nitems.type, cgutils.voidptr_t
    pyapi.incref(dtype)  # the call takes one reference
    arguments = [pointer, pyapi.pyobj, _CODE, word.as_pointer(), pointer, pointer, _CODE, pointer]
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(pyapi.pyobj, arguments), "scanlib_new_ndarray"
    )
    ndarray = builder.module.globals.get("scanlib_ndarray")
    if ndarray is None:
        ndarray = ir.GlobalVariable(builder.module, ir.IntType(8), "scanlib_ndarray")
        ndarray.linkage = "external"
    shape = cgutils.alloca_once_value(builder, array.shape)
    none, zero = ir.Constant(pointer, None), ir.Constant(_CODE, 0)
    sizes = builder.bitcast(shape, word.as_pointer())
    given = [ndarray, dtype, ir.Constant(_CODE, kind.ndim), sizes, none, none, zero, none]
    return builder.call(function, given)
