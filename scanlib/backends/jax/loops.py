"""`Scan` under JAX: `lax.scan` where the number of steps is known, `lax.while_loop` elsewhere; and
`AssociativeScan`, whose rows are combined in a tree.

Inside compiled code the length of an array is known, so loops over sequences, and loops of a
constant number of steps, are `lax.scan`::

    (window, carry), (y, z) = lax.scan(step, (initial rows, carry), rows of the sequences)

A state of depth `K` is carried as its last `K` rows, the latest one first; a history is its initial
rows and the stacked new ones. A loop that ends by a condition, or whose number of steps depends on
the steps of one that does, is a `lax.while_loop` that takes the same step and writes its rows into
buffers as long as the loop can get, in the order of the steps. Its histories are `Bounded`.

On a CPU, associative loops are walked as well (`ops.lowered.associative_scan`). Elsewhere they are
`lax.associative_scan` of the body, vectorized over time: a tree of logarithmic depth.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from pytensor.compile.aliasing import add_supervisor_to_fgraph
from pytensor.compile.io import In
from pytensor.compile.mode import get_mode
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.link.jax.dispatch.basic import jax_funcify
from pytensor.tensor.shape import Shape_i

from scanlib._compat import thaw_graph
from scanlib._compat.jax import JAXShapeTuple
from scanlib.backends.jax.bounded import (
    Bounded,
    Length,
    UnknownLengthError,
    marked,
    number_of,
    rows_of,
    static_int,
)
from scanlib.backends.jax.partitioned import varying
from scanlib.ops.errors import StepShapeError
from scanlib.ops.graph import is_numeric
from scanlib.ops.linker_features import NeedsKnownLengths
from scanlib.ops.lowered.associative_scan import AssociativeScan
from scanlib.ops.messages import Messages, loop_title
from scanlib.ops.scan import Scan
from scanlib.ops.signature import OuterInputs


def single(results: list[Any]) -> Any:
    """Return results as PyTensor's linker takes them: one alone, several as a list."""
    return results[0] if len(results) == 1 else results


# Bodies


def function_of(inputs: Sequence[Variable], outputs: Sequence[Variable]) -> Callable[..., tuple]:
    """Return the JAX function of a graph, after PyTensor's JAX rewrites; the graph is copied."""
    with jax.ensure_compile_time_eval():  # its constants are for every program that calls it
        return jax_funcify(_rewritten(FunctionGraph(list(inputs), list(outputs), clone=True)))


def prepared_body(op: Scan, node: Apply) -> FunctionGraph:
    """Return the body of a loop after PyTensor's JAX rewrites; integers that are the same at all
    steps may be known: constants, and those that `scanlib.backends.jax.prepare` has made so."""
    fgraph = thaw_graph(op.body)
    inner = op.signature.split_body_inputs(fgraph.inputs).non_sequences
    outer = op.signature.split_inputs(node.inputs).non_sequences
    known = {v for v, given in zip(inner, outer, strict=True) if _is_known(given)}
    return _rewritten(fgraph, [v for v in fgraph.inputs if v not in known])


def _is_known(variable: Variable) -> bool:
    if variable.owner is None:
        return isinstance(variable, Constant)
    return isinstance(variable.owner.op, JAXShapeTuple | Shape_i)


def _rewritten(fgraph: FunctionGraph, data: Sequence[Variable] = ()) -> FunctionGraph:
    specs = [In(variable, borrow=True, mutable=False) for variable in fgraph.inputs]
    add_supervisor_to_fgraph(fgraph=fgraph, input_specs=specs, accept_inplace=True)
    # Sizes that a step computes are known as well.
    fgraph.attach_feature(NeedsKnownLengths(data))
    get_mode("JAX").optimizer.rewrite(fgraph)
    return fgraph


def array_of(value: Any, variable: Variable) -> Any:
    """Return numbers, also Python's, as an array of a variable's dtype, others as they are."""
    if not is_numeric(variable):
        return value
    dtype = jax.dtypes.canonicalize_dtype(variable.type.dtype)
    return jnp.asarray(number_of(value), dtype=dtype)


# Loops


class StepCount(NamedTuple):
    """How many steps a loop takes: `known` to the compiler or not, and at most `bound`."""

    number: Any
    known: int | None
    bound: int


def count_steps(n_steps: Any, sequences: Sequence[Any], title: str) -> StepCount:
    """Return the number of steps of a loop that is given it, or has sequences that tell it."""
    room = [len(rows_of(sequence)) for sequence in sequences]
    partial = [sequence for sequence in sequences if isinstance(sequence, Bounded)]
    if isinstance(n_steps, Length):
        room.append(n_steps.bound)
    bound = min(room, default=None)
    told: Any = partial[0].length if partial else bound
    number = told if n_steps is None else number_of(n_steps)
    known = static_int(number)
    if known is not None:
        return StepCount(known, known, known)
    if bound is None:
        raise UnknownLengthError(
            f"{title}: JAX needs to know when it compiles how many rows the results of a "
            "loop can have, but the number of steps is computed by the function itself and no "
            "sequence bounds it. Pass that as an input or a constant, or loop over a sequence "
            "of the greatest length"
        )
    return StepCount(jnp.minimum(jnp.maximum(number, 0), bound), None, bound)


class JAXLoop:
    """Runs one `Scan` on JAX values; `node` has its inputs, `precision` is that of products in a
    step (`jax.default_matmul_precision`), the user's without it."""

    def __init__(self, op: Scan, node: Apply, precision: str | None = None) -> None:
        self.op, self.node, self.precision = op, node, precision
        self.signature = op.signature
        self.messages = Messages(op.signature, op.labels, op.name)
        self.inner = op.signature.split_body_inputs(op.body.inputs)
        self.result = op.signature.split_body_outputs(op.body.outputs)
        title = loop_title(op.name, op.labels.function)
        self.title = title if op.name else f"a {title}"

    @cached_property
    def function(self) -> Callable[..., tuple]:
        """One step: the body as a function of JAX arrays."""
        with jax.ensure_compile_time_eval():  # its constants are for every program that calls it
            return jax_funcify(prepared_body(self.op, self.node))

    def __call__(self, *inputs: Any) -> list[Any]:
        signature = self.signature
        outer = self.typed(signature.split_inputs(inputs))
        steps = count_steps(outer.n_steps, outer.sequences, self.title)
        self.check(outer, steps)
        initials, carries = varying(outer.initials, inputs), varying(outer.carries, inputs)
        windows = [  # the initial rows of each state, the latest one first
            [initial[k if signature.reverse else depth - 1 - k] for k in range(depth)]
            for initial, depth in zip(initials, signature.depths, strict=True)
        ]
        start = (windows, carries)
        is_known = steps.known is not None and not signature.has_stop
        if steps.bound == 0:  # XLA has no rows to index then
            kept = [jnp.zeros((0, *row.shape), row.dtype) for row in self.kept_rows(outer, start)]
            (windows, carries), rows, taken = start, kept, 0
        elif is_known:
            taken = steps.bound
            (windows, carries), rows = lax.scan(
                lambda state, rows: self.advance(outer, state, rows)[:2],
                start,
                [rows_of(sequence)[:taken] for sequence in outer.sequences],
                length=taken,
                reverse=signature.reverse,
            )
        else:
            (windows, carries), rows, taken = self.run_unknown(outer, steps, start)
        results = self.results(initials, windows, carries, rows)
        return results if is_known else self.as_stopped(steps.bound, results, taken)

    # Before the first step

    def typed(self, outer: OuterInputs) -> OuterInputs:
        """Return the inputs as arrays of the body's dtypes."""

        def array(value: Any, variable: Any) -> Any:
            return value if isinstance(value, Bounded) else array_of(value, variable)

        return outer._replace(
            sequences=[array(*pair) for pair in zip(outer.sequences, self.inner.rows, strict=True)],
            initials=[
                array_of(initial.rows[:depth] if isinstance(initial, Bounded) else initial, taps[0])
                for initial, taps, depth in zip(
                    outer.initials, self.inner.taps, self.signature.depths, strict=True
                )
            ],
            carries=list(map(array_of, outer.carries, self.inner.carries)),
        )

    def check(self, outer: OuterInputs, steps: StepCount) -> None:
        """Raise what can be known to be wrong when JAX compiles."""
        if steps.known is not None:
            lengths = (None if isinstance(s, Bounded) else len(s) for s in outer.sequences)
            self.messages.count_steps(steps.known, lengths)
            if steps.known < self.signature.required_steps:
                raise IndexError(self.messages.missing_steps())
        self.messages.check_initial_rows(map(len, outer.initials))

    # One step

    def advance(self, outer: OuterInputs, state: Any, rows: list[Any]) -> Any:
        """Take one step, in the dtypes of the body: return windows and carries, the rows that are
        kept over time, and stop."""
        (windows, carries), signature = state, self.signature
        taps = [
            window[-offset - 1]
            for window, offsets in zip(windows, signature.taps, strict=True)
            for offset in offsets
        ]
        wanted = self.precision
        with jax.default_matmul_precision(wanted) if wanted else nullcontext():
            values = self.function(*rows, *taps, *carries, *outer.non_sequences)
        found = signature.split_body_outputs(values)
        firsts = (taps[0] for taps in self.inner.taps)
        states = list(map(array_of, found.states, firsts))
        for i, (value, window) in enumerate(zip(states, windows, strict=True)):
            for axis, (size, wanted) in enumerate(zip(value.shape, window[0].shape, strict=True)):
                if size != wanted:
                    raise StepShapeError(self.messages.state_shape(i, axis), 0, wanted, size)
        moved = [[v, *w[:-1]] for v, w in zip(states, windows, strict=True)]
        kept = [v for v, untraced in zip(states, signature.untraced, strict=True) if not untraced]
        kept += map(array_of, found.outputs, self.result.outputs)
        stop = None if found.stop is None else jnp.asarray(found.stop).reshape(()) != 0
        return (moved, list(map(array_of, found.carries, self.inner.carries))), kept, stop

    # All steps

    def run_unknown(self, outer: OuterInputs, steps: StepCount, start: Any) -> Any:
        """Run steps until one ends the loop, or all are taken, by `lax.while_loop`."""
        buffers = [
            jnp.zeros((steps.bound, *row.shape), row.dtype) for row in self.kept_rows(outer, start)
        ]

        def take(progress: Any) -> Any:
            taken, stopped, state, buffers = progress
            t, place = taken, taken
            if self.signature.reverse:
                t, place = steps.number - 1 - taken, steps.bound - 1 - taken
            rows = [
                lax.dynamic_index_in_dim(rows_of(sequence), t, keepdims=False)
                for sequence in outer.sequences
            ]
            state, kept, stop = self.advance(outer, state, rows)
            buffers = [
                lax.dynamic_update_index_in_dim(buffer, row, place, 0)
                for buffer, row in zip(buffers, kept, strict=True)
            ]
            return taken + 1, stopped if stop is None else stop, state, buffers

        first = (jnp.asarray(0), jnp.asarray(False), start, buffers)
        taken, _, state, buffers = lax.while_loop(
            lambda progress: (progress[0] < steps.number) & ~progress[1],
            take,
            varying(first, outer),
        )
        return state, buffers, taken

    def kept_rows(self, outer: OuterInputs, start: Any) -> list[Any]:
        """Return the shapes and dtypes of what a step keeps over time."""
        sequences = map(rows_of, outer.sequences)
        rows = [jax.ShapeDtypeStruct(s.shape[1:], s.dtype) for s in sequences]
        return jax.eval_shape(lambda *given: self.advance(outer, *given)[1], start, rows)

    def results(self, initials: Any, windows: Any, carries: Any, rows: list[Any]) -> list[Any]:
        """Return the results of a loop that takes all its steps."""
        signature, new = self.signature, iter(rows)
        results = []
        for initial, window, untraced in zip(initials, windows, signature.untraced, strict=True):
            if untraced:
                results.append(jnp.stack(window if signature.reverse else window[::-1]))
                continue
            row = next(new)  # XLA's compiler dies of joining no rows
            parts = [row, initial] if signature.reverse else [initial, row]
            results.append(jnp.concatenate(parts) if len(row) else initial)
        return [*results, *carries, *new]

    def cut(self, buffers: list[Any], taken: Any) -> list[Any]:
        """Return results of which only the rows of the steps that were taken count."""
        states, results = self.signature.n_states, list(buffers)
        first = len(results) - self.signature.n_outputs
        for k, own in enumerate(self.signature.steps_of(self.node.inputs).rows):
            name = f"state {k}" if k < states else f"output {k - first}"
            if own is not None and own.each_step:
                origin = f"{name} of {self.title}"
                results[k] = Bounded(results[k], taken + own.others, origin, own.others)
        return results

    def as_stopped(self, steps: int, found: list[Any], taken: Any) -> list[Any]:
        """Return what has been written for a loop of at most so many steps, of which fewer were
        taken, perhaps; the rows that a reverse loop skipped come first."""
        taken = jnp.asarray(taken)
        results = self.cut(found, taken)
        for i, value in enumerate(results):
            if isinstance(value, Bounded) and self.signature.reverse:
                results[i] = value.like(jnp.roll(value.rows, taken - steps, axis=0))
            elif not isinstance(value, Bounded) and i < self.signature.n_states:
                results[i] = marked(value, taken >= self.signature.required_steps)
        return results


@jax_funcify.register(AssociativeScan)
def funcify_associative_scan(op: AssociativeScan, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the JAX function of an associative scan."""
    scan, signature = op.scan, op.scan.signature
    graph = thaw_graph(scan.body)
    body = function_of(graph.inputs, graph.outputs)
    rows = signature.split_body_inputs(scan.body.inputs).rows
    messages = Messages(signature, scan.labels, scan.name)

    def associative_scan(*inputs: Any) -> Any:
        outer = signature.split_inputs(inputs)
        messages.count_steps(None, map(len, outer.sequences))
        pairs = zip(outer.initials, outer.sequences, rows, strict=True)
        elems = []
        for first, others, row in pairs:
            parts = [array_of(others, row), array_of(first, row)]
            elems.append(jnp.concatenate(parts if signature.reverse else parts[::-1]))

        def combine(earlier: list[Any], later: list[Any]) -> list[Any]:
            values = body(*later, *earlier, *outer.non_sequences)
            return [
                jnp.broadcast_to(array_of(value, variable), row.shape)
                for value, variable, row in zip(values, rows, earlier, strict=True)
            ]

        return single(lax.associative_scan(jax.vmap(combine), elems, reverse=signature.reverse))

    return associative_scan
