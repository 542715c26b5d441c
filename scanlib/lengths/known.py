"""What is known of lengths as soon as shapes and the integers among the inputs of a graph are.

JAX compiles a function for these, so it knows all that is computed from them alone. Other lengths
are decided by values: those of the traces of loops that end by a condition or whose number of steps
is computed from data, of slices by bounds that are computed, and of what is made of these.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from scanlib.lengths.steps import steps_of

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


class KnownLengths:
    """What is known of lengths in a graph that is compiled for known shapes.

    Parameters
    ----------
    fgraph : FunctionGraph
    data : sequence of Variable, optional
        Inputs that are not known, though they may be integers: what changes from step to step,
        where the graph is a step.
    numbers : tuple of type, optional
        Further kinds of Ops that compute numbers from numbers.
    decided : tuple of type, optional
        Kinds of Ops of which the value of the last input decides how long the results are.

    Attributes
    ----------
    unknown : set of Variable
        Arrays that have an axis of unknown length, and numbers computed from such lengths.
    loops : set of Apply
        Loops whose number of steps is not known; of those that may end by a condition, the greatest
        number.
    """

    def __init__(
        self,
        fgraph: FunctionGraph,
        data: Sequence[Variable] = (),
        numbers: tuple[type, ...] = (),
        decided: tuple[type, ...] = (),
    ) -> None:
        self.numbers = countable_scalars(fgraph, data, numbers)
        self.decided = decided
        self.lengths = Lengths()
        self._symbols: dict[Symbol, bool] = {}
        self.unknown: set[Variable] = set()
        self.loops: set[Apply] = set()
        for node in fgraph.toposort():
            steps = steps_of(node)
            if steps is not None:
                every = [self.lengths.of(sequence) for sequence in steps.sequences]
                if not (all(map(self.knows, every)) and self.has(steps.n_steps)):
                    self.loops.add(node)
            self.unknown.update(out for out in node.outputs if not self._is_sure(out))

    def has(self, number: Variable | None) -> bool:
        """Whether a number is known, or not needed."""
        if number is None or isinstance(number, Constant):
            return True
        return self.knows(self.lengths.integer(number))

    def knows(self, form: LengthForm) -> bool:
        """Whether a length is known."""
        return all(self._knows(symbol) for symbol, _ in form.terms)

    def _is_sure(self, variable: Variable) -> bool:
        """Whether all axes of an array are known, or a number is not computed from unknown ones."""
        if not getattr(variable.type, "ndim", 0):
            return variable not in self.numbers or self.has(variable)
        if not isinstance(variable.type, TensorType):
            return True
        return all(self.knows(self.lengths.of(variable, k)) for k in range(variable.type.ndim))

    def _knows(self, symbol: Symbol) -> bool:
        if symbol not in self._symbols:
            kind, what = symbol
            if kind == "minimum":
                return all(map(self.knows, what))
            found = self._knows_axis(*what) if kind == "axis" else self._knows_number(what)
            self._symbols[symbol] = found
        return self._symbols[symbol]

    def _knows_axis(self, variable: Variable, axis: int) -> bool:
        """Whether an axis is known that has its length from no other one."""
        node = variable.owner
        if node is None:
            return True
        steps = steps_of(node)
        if steps is not None:
            return axis > 0 or not steps.may_stop or not steps.rows[node.outputs.index(variable)]
        if isinstance(node.op, self.decided) and not isinstance(node.inputs[-1], Constant):
            return False
        return all(map(self._tells, node.inputs))

    def _knows_number(self, number: Variable) -> bool:
        node = number.owner
        return number in self.numbers and (node is None or all(map(self._tells, node.inputs)))

    def _tells(self, variable: Variable) -> bool:
        """Whether an input leaves no length unknown that depends on it."""
        node = variable.owner
        if getattr(variable.type, "ndim", 0):
            side_by_side = node is not None and isinstance(node.op, SIDE_BY_SIDE)
            return self._is_sure(variable) and (
                not (side_by_side and variable.type.dtype in integer_dtypes)
                or all(map(self._tells, node.inputs))
            )
        is_number = getattr(variable.type, "dtype", None) in integer_dtypes
        return not is_number or self.has(variable)
