"""Numbers that are known as soon as shapes and the integers among the inputs of a graph are.

JAX compiles a function for these, so it knows all that is computed from them alone. What else there
is, data decide.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytensor.graph.basic import Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import ScalarType
from pytensor.tensor.basic import MakeVector, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.shape import Shape_i
from pytensor.tensor.type import TensorType, integer_dtypes

COMPUTE = (Elemwise, ScalarFromTensor, TensorFromScalar, CheckAndRaise)
SIDE_BY_SIDE = (CAReduce, DimShuffle, MakeVector)  # sizes in a vector, and what is made of one


def is_scalar(variable: Variable) -> bool:
    """Whether a variable is one number."""
    if isinstance(variable.type, ScalarType):
        return True
    return isinstance(variable.type, TensorType) and variable.type.ndim == 0


def countable_scalars(
    fgraph: FunctionGraph, data: Sequence[Variable] = (), others: tuple[type, ...] = ()
) -> set[Variable]:
    """Return the scalars that are computed from sizes, integer inputs and constants alone.

    Sizes may be put side by side in between, as where PyTensor compares those of several arrays.

    Parameters
    ----------
    fgraph : FunctionGraph
    data : sequence of Variable, optional
        Integer inputs that do not count.
    others : tuple of type, optional
        Further kinds of Ops that compute numbers from numbers.
    """
    inputs = (v for v in fgraph.inputs if is_scalar(v) and v.type.dtype in integer_dtypes)
    found = set(inputs).difference(data)

    vectors: set[Variable] = set()

    def is_known(variable: Variable) -> bool:
        if isinstance(variable, Constant):
            return is_scalar(variable) or isinstance(variable.type, TensorType)
        return variable in found or variable in vectors

    for node in fgraph.toposort():
        computes = isinstance(node.op, (*COMPUTE, *SIDE_BY_SIDE, *others))
        if isinstance(node.op, Shape_i) or (computes and all(map(is_known, node.inputs))):
            for out in node.outputs:
                (found if is_scalar(out) else vectors).add(out)
    return found
