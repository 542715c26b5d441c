"""`Scan`: the canonical loop.

The recurrence, for ``t = 0 … T-1`` (or ``T-1 … 0`` with `reverse`)::

    (y_t, c, z_t[, stop]) = body(x_t, y_{t-1} … y_{t-K}, c, w)

with sequences `x` of shape (T, …), states `y` whose histories have shape (K + T, …), carries
`c` that are not stored, non-sequences `w` and stacked outputs `z` of shape (T, …). A history
holds its `K` initial rows at its start (at its end with `reverse`), so that the trace and the
previous states are views of it.
"""

from functools import cache
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FrozenFunctionGraph
from pytensor.graph.type import Type
from pytensor.tensor.random.op import RNGConsumerOp
from pytensor.tensor.random.type import RandomType
from pytensor.tensor.shape import Shape_i
from pytensor.tensor.type import TensorType, integer_dtypes

from scanlib.ops.c_linker import PrintedOp
from scanlib.ops.checkpoint_schedules import Schedule
from scanlib.ops.execution import LoopOp, load_backends
from scanlib.ops.frozen_body import HasFrozenBody
from scanlib.ops.graph import is_numeric, reached_by
from scanlib.ops.shapes import stacked_row_shapes
from scanlib.ops.signature import Labels, OuterInputs, Signature


class Scan(HasFrozenBody, LoopOp, PrintedOp):
    """A symbolic loop in canonical form: a `signature`, and a `body`, one step.

    `checkpoint` says where a gradient starts the steps again, which without reads what the loop
    stored. With `recompute`, steps are segments of a checkpointed loop: a derivative computes what
    they hold inside again, and no rewrite may compute it for all of them at once. `associative` is
    the user's promise that a step combines states and rows by an associative function.

    Two loops with the same signature, body and options are equal; names and labels do not count.
    `pullback` and `pushforward` are written above this module, in `scanlib.ops.gradient`, which
    gives them to the class.
    """

    __props__ = ("signature", "body", "truncate_gradient", "checkpoint", "recompute", "associative")

    def __init__(
        self,
        signature: Signature,
        body: FrozenFunctionGraph,
        truncate_gradient: int = -1,
        name: str | None = None,
        labels: Labels | None = None,
        checkpoint: Schedule | None = None,
        recompute: bool = False,
        associative: bool = False,
    ) -> None:
        if checkpoint is not None and signature.reverse:
            raise ValueError("a loop that walks backwards has no checkpoints")
        signature.split_body_inputs(body.inputs)
        signature.split_body_outputs(body.outputs)
        self.signature = signature
        self.body = body
        self.truncate_gradient = truncate_gradient
        self.checkpoint = checkpoint
        self.recompute = recompute
        self.associative = associative
        self.name = name
        counts = (*signature.input_sizes, signature.n_outputs)
        self.labels = labels or Labels(*((None,) * n for n in counts))  # type: ignore[arg-type]
        self._runners: dict[str, Any] = {}
        self._pattern: list[list[bool]] | None = None
        load_backends()

    @property
    def scan(self) -> "Scan":  # type: ignore[override]
        """The loop itself."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_runners": {}, "_pattern": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        load_backends()

    def __str__(self) -> str:
        flags = ["reverse"] * self.signature.reverse + ["until"] * self.signature.has_stop
        return f"Scan{{{', '.join([self.name or 'loop', *flags])}}}"

    # Types

    def outer_input_types(self) -> list[Type]:
        """Return the least specific type of each input."""
        inner = self.signature.split_body_inputs(self.body.inputs)
        groups = OuterInputs(
            pt.lscalar().type if self.signature.has_n_steps else None,
            [stacked(row.type, None) for row in inner.rows],
            [stacked(taps[0].type, None) for taps in inner.taps],
            [carry.type for carry in inner.carries],
            [variable.type for variable in inner.non_sequences],
        )
        return self.signature.join_inputs(groups)

    def make_node(self, *inputs: Variable) -> Apply:
        expected = self.outer_input_types()
        if len(inputs) != len(expected):
            raise ValueError(f"{self} takes {len(expected)} inputs, got {len(inputs)}")
        checked = [
            self._check_input(i, variable, type)
            for i, (variable, type) in enumerate(zip(inputs, expected, strict=True))
        ]
        length = self.signature.steps_of(checked).known()
        inner = self.signature.split_body_inputs(self.body.inputs)
        result = self.signature.split_body_outputs(self.body.outputs)
        histories = []
        for taps, next_state, depth, untraced in zip(
            inner.taps, result.states, self.signature.depths, self.signature.untraced, strict=True
        ):
            state_type = taps[0].type
            if any(tap.type != state_type for tap in taps):
                raise TypeError("the taps of a state must have one type")
            if not state_type.is_super(next_state.type):
                raise TypeError(f"a state of type {state_type} became {next_state.type}")
            # The K rows of an untraced state are not part of its type: PyTensor would turn the
            # read of a single row into a squeeze, which takes longer to compile than an index.
            rows = None if untraced or length is None else depth + length
            histories.append(stacked(state_type, rows)())
        for carry, next_carry in zip(inner.carries, result.carries, strict=True):
            if not carry.type.is_super(next_carry.type):
                raise TypeError(f"a carry of type {carry.type} became {next_carry.type}")
        outputs = [stacked(value.type, length)() for value in result.outputs]
        carries = [carry.type() for carry in inner.carries]
        return Apply(self, checked, [*histories, *carries, *outputs])

    def _check_input(self, position: int, variable: Variable, type: Type) -> Variable:
        if self.signature.has_n_steps and position == 0:
            variable = pt.as_tensor_variable(variable)
            if variable.type.ndim != 0 or variable.type.dtype not in integer_dtypes:
                raise TypeError(f"n_steps must be an integer scalar, got {variable.type}")
            return pt.cast(variable, "int64")
        try:
            return type.filter_variable(variable)
        except TypeError as error:
            role = self.signature.describe_input(position)
            raise TypeError(f"{self}: {role} must have type {type}, got {variable.type}") from error

    # Shapes

    def infer_shape(self, *arguments: Any) -> list[Any]:
        """Return the shapes of the outputs; called with or without an fgraph first."""
        node, shapes = arguments[-2:]
        signature = self.signature
        outer = signature.split_inputs(shapes)
        outs = signature.split_outputs(node.outputs)
        if signature.has_n_steps:
            length: Any = node.inputs[0]
        else:
            length = outer.sequences[0][0]

        @cache  # PyTensor follows what each shape is made of
        def longer(depth: int) -> Any:
            return length + depth

        def rows(out: Variable, depth: int) -> Any:
            return Shape_i(0)(out) if signature.has_stop else longer(depth)

        result: list[Any] = []
        for history, initial, depth, untraced in zip(
            outs.histories, outer.initials, signature.depths, signature.untraced, strict=True
        ):
            first = pt.constant(depth, dtype="int64") if untraced else rows(history, depth)
            result.append((first, *initial[1:]))
        result.extend(outer.carries)
        row_shapes = stacked_row_shapes(signature, self.body, node.inputs, shapes)
        for out, row in zip(outs.outputs, row_shapes, strict=True):
            dims = [Shape_i(i + 1)(out) if dim is None else dim for i, dim in enumerate(row)]
            result.append((rows(out, 0), *dims))
        return result

    def connection_pattern(self, node: Apply | None = None) -> list[list[bool]]:
        """Return, for each input and output of the loop, whether one reaches the other."""
        if self._pattern is None:  # PyTensor asks once for each result
            self._pattern = self._reach().tolist()
        return self._pattern

    def _reach(self) -> np.ndarray:
        signature, inputs = self.signature, list(self.body.inputs)
        count = int(signature.has_n_steps) + sum(signature.input_sizes)
        outer = signature.split_inputs(range(count))
        places = signature.of_body_inputs(outer)
        recurrent = [*outer.initials, *outer.carries]
        masks = reached_by(inputs, list(self.body.outputs))
        reach = np.zeros((count, len(masks)), dtype=bool)
        for i, place in enumerate(places):
            reach[place] |= np.array([mask >> i & 1 for mask in masks], dtype=bool)
        for k, place in enumerate(recurrent):  # S. Warshall, "A theorem on Boolean matrices", 1962
            reach[reach[:, k]] |= reach[place]
        for k, place in enumerate(recurrent):
            reach[place, k] = True
        reach[[place for inp, place in zip(inputs, places, strict=True) if not is_numeric(inp)]] = 0
        return reach[:, : len(masks) - signature.has_stop]


class RandomScan(Scan, RNGConsumerOp):
    """A loop that is given random generators, and says where it leaves them.

    Code that has every call of a function draw new numbers, such as PyMC's, asks the Ops that take
    generators how these go on. A generator whose Op does not say stays where it is, and every call
    draws the same.
    """

    def update(self, node: Apply) -> dict[Variable, Variable]:
        """Return where the loop leaves each generator that its steps advance."""
        first = self.signature.split_inputs(node.inputs).carries
        last = self.signature.split_outputs(node.outputs).carries
        pairs = zip(first, last, strict=True)
        return _Updates({old: new for old, new in pairs if isinstance(old.type, RandomType)})


class _Updates(dict):
    """Where generators are left; false.

    A rewrite of PyTensor's takes out draws that nobody reads, and with them the steps of their
    generators. It leaves Ops without updates alone, loops of PyTensor's among them, and so it does
    scanlib's: adopted or not, a loop draws the same numbers.
    """

    def __bool__(self) -> bool:
        return False


def stacked(type: Type, rows: int | None) -> TensorType:
    """Return the type of `rows` values of a tensor type, one above the other."""
    if not isinstance(type, TensorType):
        raise TypeError(f"only tensors are stacked over time, got {type}")
    return TensorType(type.dtype, shape=(rows, *type.shape))
