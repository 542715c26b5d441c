"""What a linker wants of the rewrites of loops, as marks on graphs; what is known of lengths."""

from collections.abc import Sequence

from pytensor.compile.builders import OpFromGraph
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.features import Feature
from pytensor.graph.fg import FunctionGraph
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import ScalarType
from pytensor.tensor.basic import MakeVector, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.shape import Shape_i
from pytensor.tensor.type import TensorType, integer_dtypes

from scanlib._compat import features

COMPUTE = (Elemwise, ScalarFromTensor, TensorFromScalar, CheckAndRaise)
SIDE_BY_SIDE = (CAReduce, DimShuffle, MakeVector)  # sizes in a vector, and what is made of one


class NeedsKnownLengths(Feature):
    """Says that the split of loops (`scanlib.rewrites.split.split`) needs to know their lengths.

    JAX compiles for known shapes. A loop whose length a value decides runs there with bounded
    buffers; the batches that a split makes of its steps would be arrays of unknown length. Graphs
    that have loops get the mark: lengths are made known (`scanlib.backends.jax.prepare`) also where
    no loop is left.

    Parameters
    ----------
    data : sequence of Variable, optional
        Inputs that are never known, though they may be integers: what changes from step to step,
        where the graph is a step.
    """

    def __init__(self, data: Sequence[Variable] = ()) -> None:
        self.data = tuple(data)


class CompilesStepProducts(Feature):
    """Says that products of all steps may be written as one `StepProducts`.

    Numba mode compiles it faster than PyTensor's own products, and for JAX no size of theirs has to
    be made known. In other graphs they are PyTensor's, which its rewrites and all linkers know.

    Parameters
    ----------
    has_loops : bool
        Whether the graph had loops, of which the rewrites that follow may leave none.
    """

    def __init__(self, has_loops: bool = True) -> None:
        self.has_loops = has_loops


def holds_scanlib_ops(fgraph: FunctionGraph) -> bool:
    """Whether an Op of scanlib stands in a graph, or in the graph of an `OpFromGraph` in it."""
    return any(
        holds_scanlib_ops(node.op.fgraph)
        if isinstance(node.op, OpFromGraph)
        else type(node.op).__module__.startswith("scanlib.")
        for node in fgraph.apply_nodes
    )


def needs_known_lengths(fgraph: FunctionGraph) -> bool:
    """Whether loops of unknown length, and all other loops of the graph, are to stay whole."""
    return bool(features(fgraph, NeedsKnownLengths))


def data_in(fgraph: FunctionGraph) -> tuple[Variable, ...]:
    """Return the inputs of a graph that are never known when it is compiled."""
    marks = features(fgraph, NeedsKnownLengths)
    return tuple(variable for mark in marks for variable in mark.data)


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


def compiles_step_products(fgraph: FunctionGraph) -> bool:
    """Whether a graph may hold `StepProducts`."""
    return bool(features(fgraph, CompilesStepProducts))
