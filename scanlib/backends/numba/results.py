"""What a compiled function hands to Python: arrays, made with little work.

Numba gives Python an array as a view of its own memory, behind an object that owns it. Making both
takes a third of a microsecond, for a few numbers longer than to compute them. Small arrays are
copied into memory of NumPy's own instead, in a third of that time.

Compiled code that calls such a function gets a tuple of arrays, as of any other.
"""

from __future__ import annotations

import ctypes
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.imputils import impl_ret_borrowed
from numba.extending import box, intrinsic, register_model
from numba.np import numpy_support
from numpy._core import multiarray

RESULTS_VERSION = "scanlib-results-1"
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
    """The type of the results of a function that Python calls."""

    def __new__(cls, kinds: tuple[Any, ...]) -> Results:
        return object.__new__(cls)


register_model(Results)(models.TupleModel)


@intrinsic
def as_results(typingctx: Any, *arrays: Any) -> Any:
    """Return a tuple of arrays that Python takes quickly (compiled code only)."""
    known = Results(arrays)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        items = cgutils.unpack_tuple(builder, arguments[0])
        result = context.make_tuple(builder, known, items)
        return impl_ret_borrowed(context, builder, known, result)

    return known(types.StarArgTuple.from_types(arrays)), codegen


@box(Results)
def _box_results(known: Results, value: Any, c: Any) -> Any:
    builder, pyapi = c.builder, c.pyapi
    items = pyapi.tuple_new(known.count)
    failed = cgutils.false_bit
    for i, kind in enumerate(known.types):
        item = builder.extract_value(value, i)
        copied = isinstance(kind, types.Array) and kind.layout == "C" and kind.mutable
        object_ = _copied(kind, item, c) if copied else c.box(kind, item)
        failed = builder.or_(failed, cgutils.is_null(builder, object_))
        pyapi.tuple_setitem(items, i, object_)
    result = cgutils.alloca_once_value(builder, items)
    with builder.if_then(failed, likely=False):
        pyapi.decref(items)
        builder.store(ir.Constant(pyapi.pyobj, None), result)
    return builder.load(result)


def _copied(kind: types.Array, item: Any, c: Any) -> Any:
    """Write a copy of an array, or numba's view of it if it is large or Python's already."""
    builder = c.builder
    array = c.context.make_array(kind)(c.context, builder, item)
    size = builder.mul(array.nitems, array.itemsize)
    small = builder.icmp_signed("<=", size, ir.Constant(size.type, SMALL))
    fresh = builder.and_(small, cgutils.is_null(builder, array.parent))
    result = cgutils.alloca_once(builder, c.pyapi.pyobj)
    with builder.if_else(fresh, likely=True) as (copying, viewing):
        with copying:
            copy = _new_array(kind, array, c)
            builder.store(copy, result)
            with builder.if_then(cgutils.is_not_null(builder, copy), likely=True):
                place = builder.gep(copy, [ir.Constant(_CODE, _DATA)])
                data = builder.load(builder.bitcast(place, cgutils.voidptr_t.as_pointer()))
                cgutils.raw_memcpy(builder, data, array.data, size, 1)
            c.context.nrt.decref(builder, kind, item)
        with viewing:
            builder.store(c.box(kind, item), result)
    return builder.load(result)


def _new_array(kind: types.Array, array: Any, c: Any) -> Any:
    """Write a call that makes an array of NumPy's own, of the shape of another."""
    builder, pyapi = c.builder, c.pyapi
    word, pointer = array.nitems.type, cgutils.voidptr_t
    dtype = c.env_manager.read_const(c.env_manager.add_const(numpy_support.as_dtype(kind.dtype)))
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
