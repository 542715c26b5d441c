"""Raw pointers (compiled code only): memory without an owner, for the inside of loops.

A view of an array costs numba a reference count and a dozen fields; in a loop over small arrays
that is most of the time, and most of the compile time as well. A pointer is one number. Nothing
checks an index here and nobody keeps the memory alive: the code that takes a pointer has checked
sizes before, and keeps the array until after its last use (`keep`).

Loads and stores of one loop can promise that what is written overlaps nothing that is read:
`load_apart` and `store_apart` carry LLVM's scoped ``noalias``, without which a loop over many
arrays is not vectorized.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from scanlib.source_keys import source_key

VERSION = source_key(__name__)


@intrinsic
def pointer(typingctx: Any, array: Any) -> Any:
    """Return the address of an array's first item."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.make_array(array)(context, builder, arguments[0]).data

    return types.CPointer(array.dtype)(array), codegen


@intrinsic
def address(typingctx: Any, start: Any) -> Any:
    """Return an address as a number."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(arguments[0], context.get_value_type(types.uintp))

    return types.uintp(start), codegen


@intrinsic
def shift(typingctx: Any, start: Any, items: Any) -> Any:
    """Return the address that lies so many items further."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.gep(arguments[0], [arguments[1]])

    return start(start, types.intp), codegen


@intrinsic
def opaque(typingctx: Any, value: Any) -> Any:
    """Return the same number or address, without a trace of how it was computed.

    LLVM writes what a loop uses in terms of where it comes from. For addresses that are sums of
    the sizes of dozens of workspaces, this took a third of a function's compile time.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = arguments[0].type
        return builder.asm(ir.FunctionType(kind, [kind]), "", "=r,0", [arguments[0]], False)

    return value(value), codegen


@intrinsic
def load(typingctx: Any, start: Any, items: Any) -> Any:
    """Return the item that lies so many items further."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.gep(arguments[0], [arguments[1]])
        return context.unpack_value(builder, start.dtype, place)

    return start.dtype(start, types.intp), codegen


@intrinsic
def store(typingctx: Any, start: Any, items: Any, value: Any) -> Any:
    """Write the item that lies so many items further."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.gep(arguments[0], [arguments[1]])
        context.pack_value(builder, start.dtype, arguments[2], place)
        return context.get_dummy_value()

    return types.void(start, types.intp, start.dtype), codegen


@cache
def apart(loop: int, written: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a `load` and a `store` for one loop that writes arrays which overlap no others.

    Parameters
    ----------
    loop : int
        A number that no other loop of the function has.
    written : int
        Which of the written arrays is stored to; -1 for loads from arrays that are not written.
        (An array that is read and written by the same loop is loaded with its own number.)
    """

    def mark(builder: Any, instruction: Any) -> None:
        scopes = _scopes(builder.module, builder.function.name, loop)
        own = [scope for number, scope in scopes.items() if number == written]
        others = [scope for number, scope in scopes.items() if number != written]
        for name, group in (("alias.scope", own), ("noalias", others)):
            if group:
                instruction.set_metadata(name, builder.module.add_metadata(group))

    @intrinsic
    def reading(typingctx: Any, start: Any, items: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = builder.gep(arguments[0], [arguments[1]])
            instruction = builder.load(place)
            mark(builder, instruction)
            return context.data_model_manager[start.dtype].from_data(builder, instruction)

        return start.dtype(start, types.intp), codegen

    @intrinsic
    def writing(typingctx: Any, start: Any, items: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = builder.gep(arguments[0], [arguments[1]])
            data = context.data_model_manager[start.dtype].as_data(builder, arguments[2])
            mark(builder, builder.store(data, place))
            return context.get_dummy_value()

        return types.void(start, types.intp, start.dtype), codegen

    return reading, writing


@cache
def load_apart(loop: int, written: int) -> Callable[..., Any]:
    """Return the `load` of one loop."""
    return apart(loop, written)[0]


@cache
def store_apart(loop: int, written: int) -> Callable[..., Any]:
    """Return the `store` of one loop."""
    return apart(loop, written)[1]


MOST_WRITTEN = 16  # arrays that one loop can tell apart


def _scopes(module: Any, function: str, loop: int) -> dict[int, Any]:
    domain = module.add_metadata([f"{function} {loop}"])
    return {
        number: module.add_metadata([f"{function} {loop} {number}", domain])
        for number in range(MOST_WRITTEN)
    }


@intrinsic
def keep(typingctx: Any, array: Any) -> Any:
    """Use an array, so that it lives until here."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_dummy_value()

    return types.void(array), codegen
