"""The last rewrite before the JAX linker: what JAX must know when it compiles, made known.

Five things are changed in graphs that hold loops, or did before these were taken apart:

1. *Static numbers.* Scalars that are computed from sizes and integer inputs alone, and that
   something other than such a computation reads, become `StaticNumber`; ranges become
   `StaticRange`, and splits by such numbers `StaticSplit`.
2. *Checks.* A check whose conditions are static is made when JAX compiles; PyTensor leaves all
   checks out.
3. *Constants.* Arrays filled with a constant keep its dtype: PyTensor writes it into its code as a
   number of Python's.
4. *Arrays of unknown length.* Results of loops whose number of steps is not known, and what is
   computed from them, meet PyTensor's own Ops; these are wrapped in `OnRows`.
5. *Masks* choose, or become the places where they are true (`masks`).
"""

from __future__ import annotations

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph, Output
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import Cast, ScalarType
from pytensor.tensor.basic import (
    Alloc,
    AllocEmpty,
    ARange,
    MakeVector,
    Split,
)
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.shape import Shape_i
from pytensor.tensor.subtensor import IncSubtensor, indices_from_subtensor

from scanlib._compat import freeze_graph, split_of
from scanlib.backends.jax.checks import StaticCheck
from scanlib.backends.jax.known_inputs import needs_value
from scanlib.backends.jax.masks import replace_masks
from scanlib.backends.jax.rows import KNOWN, OnRows
from scanlib.backends.jax.static import StaticNumber, StaticRange, StaticSplit, static_range
from scanlib.backends.jax.traces import stack_traces
from scanlib.backends.jax.unknown_lengths import lengths_in
from scanlib.backends.jax.windows import read_in_place
from scanlib.lengths.known import COMPUTE, SIDE_BY_SIDE, KnownLengths, countable_scalars, is_scalar
from scanlib.ops.linker_features import (
    data_in,
)

REASON = "scanlib_prepare_for_jax"


def prepare(fgraph: FunctionGraph) -> None:
    """Make known to JAX what it must know when it compiles."""
    stack_traces(fgraph)
    replace_masks(fgraph)
    _make_ranges(fgraph)
    data = data_in(fgraph)
    countable = countable_scalars(fgraph, data)
    _make_static(fgraph, countable)
    _make_bounded(fgraph, countable)
    _make_splits(fgraph)
    _make_checks(fgraph)
    _keep_dtypes(fgraph)
    _wrap(fgraph, lengths_in(fgraph, data))
    read_in_place(fgraph)


def _make_static(fgraph: FunctionGraph, countable: set[Variable]) -> None:
    inputs = [v for v in fgraph.inputs if v in countable and needs_value(fgraph, v)]
    kept = set(inputs)
    for node in fgraph.toposort():
        if isinstance(node.op, Shape_i) or not all(out in countable for out in node.outputs):
            continue
        for out in node.outputs:
            if any(not _continues(client, countable) for client, _ in fgraph.clients[out]):
                leaves = _leaves(out, countable)
                if all(leaf in kept or leaf.owner is not None for leaf in leaves):
                    _replace(fgraph, out, leaves, countable)
    for variable in inputs:
        others = [c for c, _ in fgraph.clients[variable] if not isinstance(c.op, StaticNumber)]
        if others:
            _replace(fgraph, variable, [variable], countable)


def _make_bounded(fgraph: FunctionGraph, countable: set[Variable]) -> None:
    """Have sizes that data decide computed in one piece, which may know what they are at most."""
    for node in fgraph.toposort():
        sizes: list[Variable] = []
        if isinstance(node.op, Alloc | AllocEmpty):
            sizes = node.inputs[int(isinstance(node.op, Alloc)) :]
        elif isinstance(node.op, StaticRange):
            sizes = node.inputs[2:]
        elif isinstance(node.op, Split):
            vector = split_of(node)[2].owner
            sizes = (
                vector.inputs if vector is not None and isinstance(vector.op, MakeVector) else []
            )
        for size in sizes:
            computed = size.owner is not None and isinstance(size.owner.op, COMPUTE)
            if computed and size not in countable:
                _replace(fgraph, size, _leaves(size, countable), countable)


def _continues(client: Apply, countable: set[Variable]) -> bool:
    """Whether a reader of a number computes another such number."""
    return bool(client.outputs) and all(out in countable for out in client.outputs)


def _leaves(variable: Variable, countable: set[Variable]) -> list[Variable]:
    """Return the sizes and other integers that a number is computed from."""
    found: dict[Variable, None] = {}
    pending = [variable]
    while pending:
        value = pending.pop()
        if isinstance(value, Constant):
            continue
        op = None if value.owner is None else value.owner.op
        # Numbers that data are reduced to are data themselves.
        is_data = isinstance(op, SIDE_BY_SIDE) and is_scalar(value) and value not in countable
        if is_data or not isinstance(op, (*COMPUTE, *SIDE_BY_SIDE)):
            found[value] = None
        else:
            pending += value.owner.inputs
    return list(found)


def _replace(
    fgraph: FunctionGraph, variable: Variable, leaves: list[Variable], countable: set[Variable]
) -> None:
    op = StaticNumber(freeze_graph(leaves, [variable]))
    new = op(*leaves)
    readers = [
        (client, position)
        for client, position in fgraph.clients[variable]
        if not isinstance(client.op, StaticNumber)
    ]
    for client, position in readers:
        value = new
        if isinstance(client.op, Elemwise | Output) and not _continues(client, countable):
            value = _as_array(new, variable.type.dtype)
        fgraph.change_node_input(client, position, value, reason=REASON)


def _as_array(number: Variable, dtype: str) -> Variable:
    """Return a number of Python's as an array, whose dtype counts where it meets data."""
    return Elemwise(Cast(ScalarType(dtype)))(number)


def _make_ranges(fgraph: FunctionGraph) -> None:
    """Have ranges made of numbers that are computed; PyTensor's rule takes constants alone."""
    for node in fgraph.toposort():
        if isinstance(node.op, ARange) and not all(isinstance(v, Constant) for v in node.inputs):
            fgraph.replace(node.outputs[0], static_range(node), reason=REASON)


def _make_splits(fgraph: FunctionGraph) -> None:
    """Have arrays cut into parts of known sizes; PyTensor's rule takes constants alone."""
    for node in fgraph.toposort():
        if not isinstance(node.op, Split):
            continue
        array, axis, sizes = split_of(node)
        if axis is None or sizes.owner is None or not isinstance(sizes.owner.op, MakeVector):
            continue
        numbers = list(map(_unchecked, sizes.owner.inputs))
        if all(isinstance(n, Constant) or _is_static(n) for n in numbers):
            new = StaticSplit(axis).make_node(array, *numbers)
            pairs = zip(node.outputs, new.outputs, strict=True)
            fgraph.replace_all(
                [(old, old.type.filter_variable(out)) for old, out in pairs], reason=REASON
            )


def _unchecked(number: Variable) -> Variable:
    """Return a number without the checks on it, which PyTensor's rules leave out as well."""
    while number.owner is not None and isinstance(number.owner.op, CheckAndRaise):
        number = number.owner.inputs[0]
    return number


def _is_static(number: Variable) -> bool:
    return number.owner is not None and isinstance(number.owner.op, StaticNumber | Shape_i)


def _make_checks(fgraph: FunctionGraph) -> None:
    """Make checks of static conditions when JAX compiles."""
    for node in fgraph.toposort():
        if not isinstance(node.op, CheckAndRaise):
            continue
        value, *conditions = node.inputs
        if all(map(_is_static, conditions)):
            new = StaticCheck(node.op.exc_type, node.op.msg)(value, *conditions)
            fgraph.replace(node.outputs[0], new, reason=REASON)


def _keep_dtypes(fgraph: FunctionGraph) -> None:
    """Cast constants that arrays are filled with, where Python has no number of their dtype."""
    for node in fgraph.toposort():
        value = node.inputs[0] if isinstance(node.op, Alloc) else None
        if not isinstance(value, Constant) or value.type.ndim:
            continue
        number = pt.constant(np.asarray(value.data.item()))
        if number.type.dtype != value.type.dtype:
            cast = Elemwise(Cast(ScalarType(value.type.dtype)))(number)
            fgraph.change_node_input(node, 0, cast, reason=REASON)


def _wrap(fgraph: FunctionGraph, lengths: KnownLengths) -> None:
    """Put `OnRows` in front of Ops that read or give arrays of unknown length."""
    unknown = lengths.unknown
    for node in fgraph.toposort():
        if not isinstance(node.op, KNOWN):
            continue
        has_unknown = any(v in unknown for v in [*node.inputs, *node.outputs])
        if has_unknown or (isinstance(node.op, IncSubtensor) and _writes_rows(node, lengths)):
            outputs = [out.type() for out in node.outputs]
            new = Apply(OnRows(node.op), list(node.inputs), outputs)
            pairs = list(zip(node.outputs, new.outputs, strict=True))
            unknown.update(out for old, out in pairs if old in unknown)
            fgraph.replace_all(pairs, reason=REASON)


def _writes_rows(node: Apply, lengths: KnownLengths) -> bool:
    """Whether an Op adds rows to a slice of rows, which `OnRows` does without a scatter, or to a
    slice by bounds that are not known."""
    indices = indices_from_subtensor(node.inputs[2:], node.op.idx_list)
    slices = [index for index in indices if isinstance(index, slice)]
    if len(indices) == len(slices) == 1 and slices[0].step is None:
        return True
    bounds = [bound for index in slices for bound in (index.start, index.stop, index.step)]
    return not all(map(lengths.has, bounds))
