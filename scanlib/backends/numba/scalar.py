"""Numbers in numba source: scalar Ops are functions of kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.link.numba.dispatch.basic import numba_funcify_ensure_cache

from scanlib.backends.numba.kernel_functions import numba_intrinsic, scalar_function
from scanlib.backends.numba.source import Source
from scanlib.kernels.scalars import NoKernelError


@intrinsic
def as_scalar(typingctx: Any, value: Any) -> Any:
    """Return the item of a 0-d array, or a scalar as it is (compiled code only)."""
    if not isinstance(value, types.Array):
        return value(value), lambda context, builder, signature, arguments: arguments[0]

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(value)(context, builder, arguments[0])
        return context.unpack_value(builder, value.dtype, array.data)

    return value.dtype(value), codegen


class ScalarCode:
    """Writes scalar code into a source."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def _function(self, op: Op, node: Apply) -> str:
        """Register the function of a node and return its name.

        It is that of PyTensor's numba dispatch, which may use the number and the static types of
        inputs; its own keys leave those out.
        """
        function, key = numba_funcify_ensure_cache(op, node=node)
        if key is not None:
            key = f"{key}{[variable.type for variable in [*node.inputs, *node.outputs]]}"
        return self.source.function(function, key)

    def _dtype(self, variable: Variable) -> str:
        dtype = np.dtype(variable.type.dtype)
        return self.source.object(f"np_{dtype.name}", dtype.type)

    def _scalar_op(self, node: Apply, items: list[str]) -> list[str]:
        """Write a scalar node and return the names of the results.

        It is a function of kernels, or of PyTensor's numba dispatch if there is none.
        """
        results = [self.source.name("s") for _ in node.outputs]
        try:
            name = self.source.function(*numba_intrinsic(scalar_function(node)), "scalar")
        except NoKernelError:
            name = self._function(node.op, node)
        given = ", ".join(items)
        if len(results) == 1:
            kind = self._dtype(node.outputs[0])
            self.source.line(f"{results[0]} = {kind}({name}({given}))")
        else:
            self.source.line(f"{', '.join(results)} = {name}({given})")
        return results
