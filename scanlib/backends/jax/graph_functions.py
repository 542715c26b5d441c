"""Graphs as functions of JAX arrays, of which some have a length that JAX does not know.

While JAX traces, a node gets what it is given, and that decides what it does:

* what is computed from known numbers is a known number (`known_numbers`);
* where an array of unknown length comes in, or a number that decides one, a rule of `rows` is it;
* a slice that a compiled loop reads is a `Window`, for that loop;
* everything else is PyTensor's own function.

The gradient of a loop reads slices of the loop's histories, ``history[:-1]`` and ``history[1:]``.
XLA has no views: as arguments of a compiled loop, slices would be copied. So the loop reads those
rows of the whole array; other Ops have a `Window` `sliced`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from pytensor.graph.basic import Apply
from pytensor.graph.fg import AbstractFunctionGraph
from pytensor.link.jax.dispatch.basic import jax_funcify, jax_typify
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor

from scanlib._compat.jax import fgraph_to_python
from scanlib.backends.jax.bounded import Bounded, UnknownLengthError, number_of, static_int
from scanlib.backends.jax.kernels import is_compiled
from scanlib.backends.jax.known_numbers import computed, may_be_known, with_bounds
from scanlib.backends.jax.rows import ALWAYS, RULES, refuse
from scanlib.lengths.known import is_scalar
from scanlib.ops.execution import LoopOp
from scanlib.ops.linker_features import holds_scanlib_ops, needs_known_lengths

_plain_graph = jax_funcify.dispatch(AbstractFunctionGraph)


@jax_funcify.register(AbstractFunctionGraph)
def funcify_graph(fgraph: AbstractFunctionGraph, **kwargs: Any) -> Callable[..., tuple]:
    """Return the function of a graph; one that has no loops, and had none, is PyTensor's."""
    if not (needs_known_lengths(fgraph) or holds_scanlib_ops(fgraph)):
        return _plain_graph(fgraph, **kwargs)
    in_place = slices_read_in_place(fgraph)

    def convert(op: Any, node: Apply, **kwargs: Any) -> Callable[..., Any]:
        function = funcify_node(op, node, **kwargs)
        if node in in_place:
            return funcify_slice(node, function)
        if isinstance(op, LoopOp) or not in_place:
            return function
        return lambda *inputs: function(*map(sliced, inputs))

    kwargs = {"fgraph_name": "jax_funcified_fgraph", **kwargs}
    kwargs.pop("node", None)
    return fgraph_to_python(fgraph, convert, type_conversion_fn=typify, **kwargs)


def typify(data: Any, **kwargs: Any) -> Any:
    """Return a constant as JAX's; arrays without the program that `jnp.array` compiles for each."""
    if isinstance(data, np.ndarray) and data.ndim:
        return jax.device_put(data)
    return jax_typify(data, **kwargs)


def funcify_node(op: Any, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the function of a node, for ordinary arrays, known numbers, and unknown lengths."""
    if type(op).__module__.startswith("scanlib."):
        return jax_funcify(op, node=node, **kwargs)
    rule, counts = RULES.of(op), may_be_known(node)
    has_bounds = counts and all(map(is_scalar, node.outputs))

    @cache
    def own() -> Callable[..., Any]:
        with jax.ensure_compile_time_eval():  # its constants are for every program that calls it
            return jax_funcify(op, node=node, **kwargs)

    def plain(*inputs: Any) -> Any:
        return own()(*map(number_of, inputs))

    def found(*inputs: Any) -> Any:
        if not any(isinstance(value, Bounded) for value in inputs):
            numbers = computed(node, inputs) if counts else None
            if numbers is not None:
                return numbers[0] if len(numbers) == 1 else numbers
            if rule not in ALWAYS:
                result = plain(*inputs)
                return with_bounds(node, inputs, result) if has_bounds else result
        return refuse(inputs) if rule is None else rule(node, plain, inputs)

    def run(*inputs: Any) -> Any:
        try:
            return found(*inputs)
        except UnknownLengthError as error:
            if not hasattr(error, "__notes__"):  # of nested graphs the innermost node is named
                error.add_note(f"The operation is {node}.")
            raise

    if rule is None:  # PyTensor has rules for constants alone of some Ops that have one here
        own()
    return run


# Slices that compiled loops read in place


@dataclass(frozen=True)
class Window:
    """Some rows of an array: ``array[start : start + length]``."""

    array: Any
    start: int
    length: int

    def __len__(self) -> int:
        return self.length

    def rows(self) -> Any:
        return self.array[self.start : self.start + self.length]


def sliced(value: Any) -> Any:
    """Return a value, the rows of a `Window` as an array."""
    return value.rows() if isinstance(value, Window) else value


def funcify_slice(node: Apply, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that gives a `Window`, where the bounds are known."""

    def slice_(array: Any, *parts: Any) -> Any:
        array = sliced(array)
        (index,) = indices_from_subtensor(parts, node.op.idx_list)
        bounds = [None if b is None else static_int(b) for b in (index.start, index.stop)]
        given = [b for b in (index.start, index.stop) if b is not None]
        if isinstance(array, Bounded) or any(static_int(b) is None for b in given):
            return plain(array, *parts)
        start, stop, _ = slice(*bounds).indices(len(array))
        return Window(array, start, max(stop - start, 0))

    return slice_


def slices_read_in_place(fgraph: AbstractFunctionGraph) -> set[Apply]:
    """Return the slices of rows that compiled loops read, as sequences."""
    loops = [node for node in fgraph.toposort() if isinstance(node.op, LoopOp)]
    return {
        value.owner
        for loop in loops
        if not loop.op.signature.has_stop and is_compiled(loop.op, loop)
        for value in loop.op.signature.split_inputs(loop.inputs).sequences
        if _is_slice_of_rows(value.owner) and value not in fgraph.outputs
    }


def _is_slice_of_rows(node: Apply | None) -> bool:
    if node is None or not isinstance(node.op, Subtensor) or len(node.op.idx_list) != 1:
        return False
    (index,) = node.op.idx_list
    return isinstance(index, slice) and index.step is None


def windows(inputs: tuple[Any, ...], count: int) -> tuple[list[Any], np.ndarray]:
    """Return the whole arrays of a loop's inputs, and which rows it reads of the first ones: so
    many sequences."""
    whole = [v if isinstance(v, Window) else Window(v, 0, len(v)) for v in inputs[:count]]
    places = np.array([(v.start, v.length) for v in whole], np.int64).reshape(-1, 2)
    return [*(v.array for v in whole), *map(sliced, inputs[count:])], places
