"""What is known of lengths as soon as shapes and the integers among the inputs of a graph are.

JAX compiles a function for these, so it knows all that is computed from them alone. Other lengths
are decided by values: those of the traces of loops that end by a condition or whose number of steps
is computed from data, of slices by bounds that are computed, and of what is made of these.
"""

from collections.abc import Sequence
from functools import cache

from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import ScalarType
from pytensor.tensor.basic import MakeVector, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.shape import Shape_i
from pytensor.tensor.type import TensorType, integer_dtypes

from scanlib.lengths.arrays import Lengths
from scanlib.lengths.forms import LengthForm, Symbol
from scanlib.lengths.numbers import steps_of

# What makes a number of numbers, puts them side by side, or makes something of those.
COMPUTE = (
    CAReduce, CheckAndRaise, DimShuffle, Elemwise, MakeVector, ScalarFromTensor, TensorFromScalar,
)  # fmt: skip


def is_scalar(variable: Variable) -> bool:
    """Whether a variable is one number."""
    if isinstance(variable.type, ScalarType):
        return True
    return isinstance(variable.type, TensorType) and variable.type.ndim == 0


def countable_scalars(
    fgraph: FunctionGraph, data: Sequence[Variable] = (), others: tuple[type, ...] = ()
) -> set[Variable]:
    """Return the scalars that are computed from sizes, integer inputs but for `data`, and constants
    alone.

    Sizes may be put side by side in between, as where PyTensor compares those of several arrays.
    `others` are further kinds of Ops that compute numbers from numbers.
    """
    inputs = (v for v in fgraph.inputs if is_scalar(v) and v.type.dtype in integer_dtypes)
    found = set(inputs).difference(data)

    vectors: set[Variable] = set()

    def is_known(variable: Variable) -> bool:
        if isinstance(variable, Constant):
            return is_scalar(variable) or isinstance(variable.type, TensorType)
        return variable in found or variable in vectors

    for node in fgraph.toposort():
        computes = isinstance(node.op, (*COMPUTE, *others))
        if isinstance(node.op, Shape_i) or (computes and all(map(is_known, node.inputs))):
            for out in node.outputs:
                (found if is_scalar(out) else vectors).add(out)
    return found


def loops_of_unknown_length(
    fgraph: FunctionGraph, data: Sequence[Variable] = (), others: tuple[type, ...] = ()
) -> set[Apply]:
    """Return the loops whose number of steps is not known in a graph that is compiled for known
    shapes; of those that may end by a condition, the greatest number.

    Of `data`, inputs, nothing is known, though they may be integers: what changes from step to
    step, where the graph is a step. `others` are further kinds of Ops that compute numbers from
    numbers.
    """
    numbers, lengths = countable_scalars(fgraph, data, others), Lengths()

    @cache
    def is_known(symbol: Symbol) -> bool:
        kind, what = symbol
        if kind == "minimum":
            return all(map(knows, what))
        variable, axis = (what, 0) if kind == "integer" else what
        node = variable.owner
        steps = None if node is None else steps_of(node)
        if steps is not None:
            return axis > 0 or not steps.may_stop
        inputs = [] if node is None else node.inputs
        given = [v for v in inputs if is_scalar(v) and v.type.dtype in integer_dtypes]
        return (kind == "axis" or variable in numbers) and all(
            knows(lengths.integer(v)) for v in given
        )

    def knows(form: LengthForm) -> bool:
        return all(is_known(symbol) for symbol, _ in form.terms)

    found = set()
    for node in fgraph.toposort():
        steps = steps_of(node)
        if steps is not None:
            forms = [lengths.of(sequence) for sequence in steps.sequences]
            if steps.n_steps is not None:
                forms.append(lengths.integer(steps.n_steps))
            if not all(map(knows, forms)):
                found.add(node)
    return found
