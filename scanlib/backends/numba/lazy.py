"""Functions that are compiled when they are first called (compiled code only).

What numba compiles includes everything that it may call. A loop with two schedules would take twice
as long to compile, to use one of them. A function made by `lazily` has the other compiled, or
loaded from numba's cache, when it is first called; until then it is a name.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from pytensor.configdefaults import config
from pytensor.link.numba.dispatch.basic import numba_njit

from scanlib._compat.numba import (
    CACHED_SRC_FUNCTIONS,
    RETCODE_EXC,
    Dispatcher,
    cgutils,
    impl_ret_new_ref,
)
from scanlib.backends.numba.bundles import Group
from scanlib.backends.numba.disk import sealed

_functions: dict[str, tuple[Callable[..., Any], bool]] = {}
_compiled: dict[bytes, tuple[Any, int]] = {}  # the dispatcher keeps the code alive
_addresses: dict[str, Callable[[], int]] = {}
_inferred: set[str] = set()  # the keys of functions whose results have the types that come out
_WORD = ir.IntType(64)


def address(what: bytes) -> int:
    """Return the address of a function, called by compiled code; `what` is its key and types."""
    if what not in _compiled:
        key, signature = pickle.loads(what)
        if key in _addresses:
            return _addresses[key]()
        compiled = _dispatcher(key)
        # On the disk it is found by the very words with which it was compiled.
        compiled.compile(signature.args if key in _inferred else signature)
        result = compiled.overloads[signature.args]
        name = result.fndesc.llvm_func_name
        _compiled[what] = compiled, result.library.get_pointer_to_function(name)
    return _compiled[what][1]


def register_address(key: str, find: Callable[[], int]) -> None:
    """Let compiled code find an address by a key; `find` is called when it is first needed."""
    _addresses[key] = find


def _dispatcher(key: str) -> Any:
    """Return the jitted form of a registered function."""
    function, cache = _functions[key]
    if not isinstance(function, Dispatcher):
        function = sealed(numba_njit(function, cache=cache and config.numba__cache))
        _functions[key] = function, cache
    return function


def register(function: Callable[..., Any], key: str, cache: bool) -> None:
    """Let compiled code find a function by its key."""
    _functions[key] = function, cache


def kernel(function: Any, version: str, *results: tuple[str, int]) -> tuple[Any, str]:
    """Return a function, for compiled code, that calls a jitted one, and its key.

    The jitted function is compiled once, with its own options, and not optimized again with the
    code that calls it. It is kept on disk under its name and version.
    """
    identity = f"{version} {function.py_func.__name__}"
    if config.numba__cache and function.py_func not in CACHED_SRC_FUNCTIONS:
        CACHED_SRC_FUNCTIONS[function.py_func] = identity
        function.enable_caching()
        sealed(function)
    key = " ".join([identity, *map(str, results)])
    return lazily(function, key, results or [types.none], cache=True), key


def lazily(
    function: Callable[..., Any],
    key: str,
    results: Sequence[tuple[str, int] | types.Type],
    cache: bool,
) -> Any:
    """Return a function, for compiled code, that takes a tuple of another's arguments.

    The tuple may hold them in groups, as `tuple_text` writes it, and in bundles.

    Parameters
    ----------
    function : callable
        The Python function, which must be registered like this in every process that runs code
        which calls it.
    key : str
        What identifies it between processes.
    results : sequence of (str, int) or numba type
        Dtype and number of dimensions of each array that it returns, all contiguous; the type of
        what is no array.
    cache : bool
        Whether numba may keep the compiled function on disk, under its own key.
    """
    register(function, key, cache)
    own = [
        result
        if isinstance(result, types.Type)
        else types.Array(numba.from_dtype(np.dtype(result[0])), result[1], "C")
        for result in results
    ]
    returned = own[0] if len(own) == 1 else types.Tuple(own)

    @intrinsic
    def call(typingctx: Any, arguments: Any) -> Any:
        return returned(arguments), _codegen(key)

    return call


# Python makes longer tuples from lists, item by item, which numba copies at each.
LONGEST_TUPLE = 24


def tuple_text(items: Sequence[str]) -> str:
    """Return the text of a tuple of arguments, in groups if they are many; see `flat_types`."""
    if len(items) <= LONGEST_TUPLE:
        return f"({', '.join(items)},)" if items else "()"
    starts = range(0, len(items), LONGEST_TUPLE)
    return tuple_text([tuple_text(items[k : k + LONGEST_TUPLE]) for k in starts])


def flat_types(whole: Any) -> list[Any]:
    """Return the types of the arguments in a tuple that `tuple_text` wrote."""
    found = []
    for kind in whole:
        if isinstance(kind, types.BaseTuple):
            found += flat_types(kind)
        else:
            found += kind.own_types if isinstance(kind, Group) else [kind]
    return found


def flat_parts(builder: Any, whole: Any, value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of a tuple that `tuple_text` wrote, with their types; groups are parts."""
    for kind, item in zip(whole, cgutils.unpack_tuple(builder, value), strict=True):
        if isinstance(kind, types.BaseTuple):
            yield from flat_parts(builder, kind, item)
        else:
            yield kind, item


def flat_values(context: Any, builder: Any, whole: Any, value: Any) -> list[Any]:
    """Return the arguments in a tuple that `tuple_text` wrote, of type `whole`."""
    found: list[Any] = []
    for kind, item in flat_parts(builder, whole, value):
        grouped = isinstance(kind, Group)
        found += kind.arrays(context, builder, item) if grouped else [item]
    return found


def apart(function: Callable[..., Any], key: str, cache: bool) -> Any:
    """Return a function, for compiled code, that calls another with the same arguments.

    The other is compiled for itself as soon as the types of its arguments are known, and so are
    those of its results; the parameters are those of `lazily`. It is not optimized once more with
    the code that calls it.
    """
    register(function, key, cache)
    _inferred.add(key)

    @intrinsic
    def call(typingctx: Any, *arguments: Any) -> Any:
        compiled = _dispatcher(key)
        compiled.compile(arguments)
        returned = compiled.overloads[arguments].signature.return_type
        return returned(types.StarArgTuple.from_types(arguments)), _codegen(key)

    return call


def _codegen(key: str) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        own = signature.return_type(*flat_types(signature.args[0]))
        convention = context.call_conv
        pointer = convention.get_function_type(own.return_type, own.args).as_pointer()
        target = builder.inttoptr(address_of(context, builder, key, own), pointer)
        values = flat_values(context, builder, signature.args[0], arguments[0])
        status, result = convention.call_function(
            builder, target, own.return_type, own.args, values
        )
        with cgutils.if_unlikely(builder, status.is_error):
            convention.return_status_propagate(builder, status)
        return impl_ret_new_ref(context, builder, own.return_type, result)

    return codegen


def address_of(context: Any, builder: Any, key: str, own: Any = None) -> Any:
    """Write the number that is a registered address, or a registered function's, compiled for a
    signature."""
    what = pickle.dumps((key, own))
    place = cgutils.add_global_variable(builder.module, _WORD, f"scanlib_lazy_{key}")
    place.linkage = "internal"
    place.initializer = ir.Constant(_WORD, 0)
    unknown = builder.icmp_unsigned("==", builder.load(place), ir.Constant(_WORD, 0))
    with cgutils.if_unlikely(builder, unknown):
        builder.store(_ask_for_address(context, builder, what), place)
    return builder.load(place)


def _ask_for_address(context: Any, builder: Any, what: bytes) -> Any:
    """Write the call of `address`; if it raises, the exception goes to whoever called."""
    name = f"scanlib_ask_{sha256(what).hexdigest()[:16]}"
    module = builder.module
    ask = module.globals.get(name)
    if ask is None:
        # Once per module, however many calls there are: this is code that runs once.
        ask = ir.Function(module, ir.FunctionType(_WORD, []), name)
        ask.linkage = "internal"
        ask.attributes.add("noinline")
        _write_asking(context, ir.IRBuilder(ask.append_basic_block("entry")), what)
    number = builder.call(ask, [])
    with cgutils.if_unlikely(builder, builder.icmp_unsigned("==", number, ir.Constant(_WORD, 0))):
        context.call_conv._return_errcode_raw(builder, RETCODE_EXC)
    return number


def _write_asking(context: Any, builder: Any, what: bytes) -> None:
    """Write a function that calls `address` and returns zero where that raises."""
    python = context.get_python_api(builder)
    lock = python.gil_ensure()
    name = context.insert_const_string(builder.module, __name__)
    module = python.import_module(name)
    function = python.object_getattr_string(module, address.__name__)
    text = context.insert_const_bytes(builder.module, what)
    key = python.bytes_from_string_and_size(text, ir.Constant(_WORD, len(what)))
    found = python.call_function_objargs(function, [key])
    for item in (key, function, module):
        python.decref(item)
    with cgutils.if_unlikely(builder, cgutils.is_null(builder, found)):
        python.gil_release(lock)
        builder.ret(ir.Constant(_WORD, 0))
    number = python.long_as_longlong(found)
    python.decref(found)
    python.gil_release(lock)
    builder.ret(number)
