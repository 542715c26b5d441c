"""A chance to interrupt a loop that numba compiles."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from scanlib._compat.numba import RETCODE_EXC, cgutils
from scanlib.backends.numba.addresses import address_of, register_address
from scanlib.kernels.python_driver import poll_address

register_address("scanlib poll", poll_address)


def poll_pointer(context: Any, builder: Any) -> Any:
    """Write the address of the function that tells whether to end."""
    return address_of(context, builder, "scanlib poll")


@intrinsic
def poll(typingctx: Any) -> Any:
    """Raise, in compiled code, what a signal has raised."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), []).as_pointer()
        ask = builder.inttoptr(poll_pointer(context, builder), kind)
        wanted = builder.icmp_signed("!=", builder.call(ask, []), ir.Constant(ir.IntType(32), 0))
        with cgutils.if_unlikely(builder, wanted):
            context.call_conv._return_errcode_raw(builder, RETCODE_EXC)
        return context.get_dummy_value()

    return types.none(), codegen
