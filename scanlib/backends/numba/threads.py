"""Parts of a loop in threads of their own (compiled code only).

Threads are those of the operating system, started for each call and joined before it returns.
numba's own would have to be compiled for seconds, keep their place between calls, do not survive a
fork, and abort the program where two of Python's threads use them at once.

A part is a function without results, of its number `k`, the number of parts, and arguments that all
parts share. It must not call Python: the thread that waits for the others may hold Python's lock.
An error that a part raises is raised again, by the caller, once all parts have ended.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic
from pytensor.configdefaults import config

from scanlib.backends.numba.lazy import address_of, register
from scanlib.kernels.parts import system_has_threads

VERSION = "scanlib-threads-1"

_WORD = ir.IntType(64)
_CODE = ir.IntType(32)
_BYTES = ir.IntType(8).as_pointer()


def wanted_threads() -> int:
    """Return how many threads a loop may use in compiled code."""
    return config.scanlib__threads if system_has_threads() else 1


def shared_names(outside: list[str], arguments: Iterable[str], inside: list[str]) -> list[str]:
    """Return the names that a part's lines read and that lines outside of it, or a caller, write.

    Indices of loops are a part's own, and so are its number `k` and the number of `parts`.
    """
    tree = _tree(inside)
    loops = [node.target for node in ast.walk(tree) if isinstance(node, ast.For)]
    own = {"k", "parts", *(target.id for target in loops if isinstance(target, ast.Name))}
    given = {*arguments} | _names(_tree(outside), ast.Store)
    return sorted((given & _names(tree, ast.Load)) - own)


def _tree(lines: list[str]) -> ast.AST:
    return ast.parse("\n".join(["def function():", *lines, "    pass"]))


def _names(tree: ast.AST, context: type[ast.expr_context]) -> set[str]:
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    return {node.id for node in found if isinstance(node.ctx, context)}


def in_threads(function: Callable[..., Any], key: str, most: int) -> Any:
    """Return a function, for compiled code, that calls another's parts at the same time.

    Parameters
    ----------
    function : callable
        The Python function ``function(k, parts, *arguments)``; see the module.
    key : str
        What identifies it between processes.
    most : int
        How many parts there are at most.

    Returns
    -------
    intrinsic
        ``call(parts, arguments)``, with a tuple of arguments. The first part runs in the caller's
        thread; a part for which there is no thread does so after it.
    """
    register(function, key, True)

    @intrinsic
    def call(typingctx: Any, parts: Any, arguments: Any) -> Any:
        own = types.none(types.intp, types.intp, *arguments)

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            items = cgutils.unpack_tuple(builder, values[1])
            _write(context, builder, key, own, most, values[0], items)
            return context.get_dummy_value()

        return types.none(types.intp, arguments), codegen

    return call


def _write(
    context: Any, builder: Any, key: str, own: Any, most: int, parts: Any, items: list[Any]
) -> None:
    """Write the parts' arguments to memory, and the calls of all of them."""
    target = address_of(context, builder, key, own)
    kinds = [context.get_value_type(kind) for kind in own.args[2:]]
    shared_type = ir.LiteralStructType([_WORD, _WORD, *kinds])
    shared = cgutils.alloca_once(builder, shared_type)
    for place, value in enumerate([target, parts, *items]):
        builder.store(value, _field(builder, shared, place))
    # What belongs to one part: what is shared, its number, its status and its error.
    error = _error_type(context)
    task_type = ir.LiteralStructType([shared_type.as_pointer(), _WORD, _CODE, error])
    tasks = cgutils.alloca_once(builder, ir.ArrayType(task_type, most))
    threads = cgutils.alloca_once(builder, ir.ArrayType(_WORD, most))
    failed = cgutils.alloca_once(builder, ir.ArrayType(_CODE, most))
    worker = _worker(context, builder.module, key, own, shared_type, task_type)
    create, join = _system_functions(builder.module)

    def task(k: Any) -> Any:
        return builder.gep(tasks, [ir.Constant(_WORD, 0), k])

    def item(array: Any, k: Any) -> Any:
        return builder.gep(array, [ir.Constant(_WORD, 0), k])

    one, null = ir.Constant(_WORD, 1), ir.Constant(_BYTES, None)
    with cgutils.for_range(builder, parts, intp=_WORD) as loop:
        builder.store(shared, _field(builder, task(loop.index), 0))
        builder.store(loop.index, _field(builder, task(loop.index), 1))
    with cgutils.for_range_slice(builder, one, parts, one, _WORD) as (k, _):
        argument = builder.bitcast(task(k), _BYTES)
        code = builder.call(create, [item(threads, k), null, worker, argument])
        builder.store(code, item(failed, k))
    builder.call(worker, [builder.bitcast(task(ir.Constant(_WORD, 0)), _BYTES)])
    with cgutils.for_range_slice(builder, one, parts, one, _WORD) as (k, _):
        started = builder.icmp_signed("==", builder.load(item(failed, k)), ir.Constant(_CODE, 0))
        with builder.if_else(started) as (there, missing):
            with there:
                builder.call(join, [builder.load(item(threads, k)), null])
            with missing:
                builder.call(worker, [builder.bitcast(task(k), _BYTES)])
    with cgutils.for_range(builder, parts, intp=_WORD) as loop:
        code = builder.load(_field(builder, task(loop.index), 2))
        with cgutils.if_unlikely(builder, builder.icmp_signed("!=", code, ir.Constant(_CODE, 0))):
            found = builder.load(_field(builder, task(loop.index), 3))
            builder.store(found, context.call_conv._get_excinfo_argument(builder.function))
            context.call_conv._return_errcode_raw(builder, code)


def _field(builder: Any, pointer: Any, place: int) -> Any:
    return builder.gep(pointer, [ir.Constant(_CODE, 0), ir.Constant(_CODE, place)])


def _error_type(context: Any) -> Any:
    """Return the type of the pointer to what a compiled function raised."""
    function = context.call_conv.get_function_type(types.none, ())
    return function.args[1].pointee


def _system_functions(module: Any) -> tuple[Any, Any]:
    """Return the functions that start a thread and that wait for one."""
    work = ir.FunctionType(_BYTES, [_BYTES]).as_pointer()
    create = ir.FunctionType(_CODE, [_WORD.as_pointer(), _BYTES, work, _BYTES])
    join = ir.FunctionType(_CODE, [_WORD, _BYTES])
    return (
        cgutils.get_or_insert_function(module, create, "pthread_create"),
        cgutils.get_or_insert_function(module, join, "pthread_join"),
    )


def _worker(context: Any, module: Any, key: str, own: Any, shared_type: Any, task_type: Any) -> Any:
    """Return the function that a thread runs: it calls one part, and keeps its status."""
    name = f"scanlib_worker_{key}"
    if name in module.globals:
        return module.globals[name]
    worker = ir.Function(module, ir.FunctionType(_BYTES, [_BYTES]), name)
    worker.linkage = "internal"
    builder = ir.IRBuilder(worker.append_basic_block("entry"))
    task = builder.bitcast(worker.args[0], task_type.as_pointer())
    shared = builder.load(_field(builder, task, 0))
    convention = context.call_conv
    pointer = convention.get_function_type(own.return_type, own.args).as_pointer()
    target = builder.inttoptr(builder.load(_field(builder, shared, 0)), pointer)
    values = [builder.load(_field(builder, task, 1))]
    values += [builder.load(_field(builder, shared, place)) for place in range(1, len(own.args))]
    status, _ = convention.call_function(builder, target, own.return_type, own.args, values)
    code = builder.select(status.is_error, status.code, ir.Constant(_CODE, 0))
    builder.store(code, _field(builder, task, 2))
    builder.store(status.excinfoptr, _field(builder, task, 3))
    builder.ret(ir.Constant(_BYTES, None))
    return worker


@intrinsic
def unshared(typingctx: Any, array: Any) -> Any:
    """Return an array, for which the compiler may assume that no other name leads to its memory.

    So it knows of arrays that a function makes itself; what a part writes to, its caller made.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        old = context.make_array(array)(context, builder, arguments[0])
        new = context.make_array(array)(context, builder)
        for name in old._datamodel._fields:
            setattr(new, name, getattr(old, name))
        data = builder.bitcast(old.data, _BYTES)
        known = builder.call(_unshared_pointer(builder.module), [data])
        new.data = builder.bitcast(known, old.data.type)
        return impl_ret_borrowed(context, builder, array, new._getvalue())

    return array(array), codegen


def _unshared_pointer(module: Any) -> Any:
    """Return a function that returns its argument, and of which the compiler knows no more."""
    name = "scanlib_unshared"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(_BYTES, [_BYTES]), name)
    function.linkage = "internal"
    function.return_value.add_attribute("noalias")
    function.attributes.add("noinline")
    function.attributes.add("optnone")
    ir.IRBuilder(function.append_basic_block("entry")).ret(function.args[0])
    return function
