"""A plain numba loop: what there is where an Op of the step has no kernel.

Random draws, decompositions of LAPACK's, loops of such; in compiled code, carries that may change
their shapes. Of a step, nodes that have kernels are gathered into programs, and others are
PyTensor's functions. What is here walks the steps:

* Rows of sequences and histories are views. An untraced state has a ring of ``K + 1`` rows, so that
  a step never writes what it reads.
* Carries start as copies, so that a step may overwrite the memory of those it owns (see
  `prepare_body`); nothing returned shares memory with an input or another result. Python makes
  these copies where it calls the loop.
* A stacked output is allocated at the first step. With `until` (and forward in time) storage grows
  by doubling.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import pytensor
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from pytensor.compile.aliasing import add_supervisor_to_fgraph
from pytensor.compile.io import In
from pytensor.compile.mode import NUMBA
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.link.numba.dispatch.basic import (
    cache_key_for_constant,
    numba_funcify_and_cache_key,
    numba_njit,
    numba_typify,
)
from pytensor.tensor.basic import ScalarFromTensor

from scanlib._compat import thaw_graph
from scanlib._compat.numba import RETCODE_EXC, cgutils, compile_numba_function_src, numba_deepcopy
from scanlib.backends.handler.clusters import gather
from scanlib.backends.handler.programs import program_of_node
from scanlib.backends.handler.thunks import library
from scanlib.backends.numba.disk import sealed
from scanlib.backends.numba.memory import as_array, new_array, row_view
from scanlib.backends.numba.programs import call_program
from scanlib.ops.errors import InitialRowsError, SequenceLengthError, StepCountError, StepShapeError
from scanlib.ops.execution import brings
from scanlib.ops.graph import is_tensor
from scanlib.ops.kernel_graph import KernelGraph
from scanlib.ops.messages import Messages
from scanlib.ops.python_loop import FIRST_CAPACITY, row_shape_graph
from scanlib.ops.row_ops.triangular import true_shapes
from scanlib.ops.scan import Scan
from scanlib.source_keys import source_key

STEPS_PER_POLL = 4


@intrinsic
def poll(typingctx: Any) -> Any:
    """Raise, in compiled code, what a signal has raised."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        ask = cgutils.get_or_insert_function(builder.module, kind, "PyErr_CheckSignals")
        python = context.get_python_api(builder)
        lock = python.gil_ensure()  # code compiled with `nogil` may have given it up
        found = builder.call(ask, [])
        python.gil_release(lock)
        wanted = builder.icmp_signed("!=", found, ir.Constant(ir.IntType(32), 0))
        with cgutils.if_unlikely(builder, wanted):
            context.call_conv._return_errcode_raw(builder, RETCODE_EXC)
        return context.get_dummy_value()

    return types.none(), codegen


class LoopWriter:
    """Writes the function of one loop.

    In its text ``x`` are the inputs of the loop, ``h`` histories, ``c`` carries, ``z`` stacked
    outputs, ``y`` rows that a step reads, and ``v`` what it computes. The loop may copy carries:
    those that it owns at first, others at last.
    """

    def __init__(self, op: Scan, copies_carries: bool = False) -> None:
        self.op, self.signature, self.reverse = op, op.signature, op.signature.reverse
        self.grows = op.signature.has_stop and not op.signature.reverse
        self.messages = Messages(op.signature, op.labels, op.name)
        self.copy_of = "numba_deepcopy({})" if copies_carries else "{}"
        self.body = prepare_body(op)
        types = op.outer_input_types()
        self.arguments = [f"x{i}" for i in range(len(types))]
        self.outer = self.signature.split_inputs(self.arguments)
        self.row_ndims = [type.ndim - 1 for type in self.signature.split_inputs(types).initials]
        made = self.body.fgraph.outputs
        self.outputs = [out.type for out in self.signature.split_body_outputs(made).outputs]
        self.lines: list[str] = []
        self.indent = 1
        self.count = 0
        # What are numbers and not arrays, with how an array is made of them.
        self.numbers: dict[str, str] = {}
        self.globals: dict[str, Any] = {"np": np, "__name__": __name__}
        for known in (as_array, new_array, row_view, numba_deepcopy, poll):
            self.globals[known.__name__] = known
        # What tells functions from others, beside the keys of what the text has names for.
        self.identity = f"{__name__} {source_key()} {pytensor.__version__} {config.numba__fastmath}"
        self.keys: dict[str | None, str] = {}

    def write(self) -> tuple[Callable[..., Any], str | None]:
        """Return the loop's function and its cache key."""
        self.write_checks()
        self.write_storage()
        self.line("i, stopped = 0, False")
        with self.block("while i < steps and not stopped:"):
            self.write_step()
            self.line("i += 1")
        self.write_return()
        text = "\n".join([f"def scan_loop({', '.join(self.arguments)}):", *self.lines])
        key = None
        if None not in self.keys:
            key = sha256(f"{self.identity} {text} {self.keys}".encode()).hexdigest()
        return compile_numba_function_src(text, "scan_loop", self.globals, cache_key=key), key

    def line(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    @contextmanager
    def block(self, header: str) -> Iterator[None]:
        """Write a header, and what is written inside the context indented."""
        self.line(header)
        self.indent += 1
        yield
        self.indent -= 1

    def write_graph(self, fgraph: FunctionGraph, given: Sequence[str]) -> list[str]:
        """Write a graph, what has kernels as few programs; return the names of its results."""
        if library() is not None:
            gather(fgraph)
        names = dict(zip(fgraph.inputs, given, strict=True))

        def name(variable: Variable) -> str:
            if variable not in names:
                names[variable] = self.constant(variable)
            return names[variable]

        for node in fgraph.toposort():
            if isinstance(node.op, ScalarFromTensor):
                names[node.outputs[0]] = self.number(name(node.inputs[0]))
                continue
            is_program = isinstance(node.op, KernelGraph)
            inputs = [
                name(v) if is_program or not is_tensor(v) else self.array(name(v))
                for v in node.inputs
            ]
            for out in node.outputs:
                self.count += 1
                names[out] = f"v{self.count}"
                if is_program and out.type.ndim == 0:
                    self.numbers[names[out]] = f"as_array({names[out]})"
            results = ", ".join(names[out] for out in node.outputs)
            self.line(f"{results} = {self.function(node)}({', '.join(inputs)})")
        return [name(out) for out in fgraph.outputs]

    def array(self, name: str) -> str:
        """Return what is taken by all but programs: an array of no axes, not a number."""
        return self.numbers.get(name, name)

    def number(self, name: str) -> str:
        """Return the item of an array of no axes."""
        return name if name in self.numbers else f"{name}.item()"

    def function(self, node: Apply) -> str:
        """Return the name of the function of a node, which is compiled into the loop."""
        program = program_of_node(node) if isinstance(node.op, KernelGraph) else None
        if program is not None:
            return self.known(*call_program(program, numbers=True))
        function, key = numba_funcify_and_cache_key(node.op, node=node)
        # PyTensor's keys leave out static shapes, which functions may depend on.
        shapes = [getattr(v.type, "shape", None) for v in [*node.inputs, *node.outputs]]
        key = None if key is None else f"{key} {shapes}"
        if key is not None and not type(node.op).__module__.startswith("scanlib."):
            # On disk, these are kept by themselves too: other loops have the same.
            name = function.__name__
            function = compile_numba_function_src(
                f"def {name}(*inputs):\n    return function(*inputs)",
                name,
                {"function": function, "__name__": __name__},
                cache_key=sha256(f"{self.identity} {key}".encode()).hexdigest(),
            )
            function = numba_njit(function, cache=config.numba__cache, forceinline=True)
        return self.known(sealed(function), key)

    def constant(self, variable: Constant) -> str:
        value = numba_typify(variable.data, variable=variable)
        if isinstance(value, np.ndarray) and not value.flags.forc:
            value = np.ascontiguousarray(value)
        return self.known(value, f"{type(value)} {cache_key_for_constant(value)}")

    def known(self, value: Any, key: str | None) -> str:
        """Return the name of what the text refers to; what has no key cannot be kept on disk."""
        if key is None or key not in self.keys:
            self.keys[key] = f"k{len(self.globals)}"
            self.globals[self.keys[key]] = value
        return self.keys[key]

    def fail_if(self, wrong: str, kind: type[Exception], text: str, *numbers: str) -> None:
        """Write that an error is raised if something is so; its class puts the numbers in."""
        self.globals[kind.__name__] = kind
        self.line(f"if {wrong}: raise {kind.__name__}({', '.join([repr(text), *numbers])})")

    def new(self, name: str, dtype: str, *sizes: str) -> None:
        self.line(f"{name} = new_array({', '.join([dtype, *sizes])})")

    def copy(self, target: str, row: str, source: str, ndim: int, *at: str) -> None:
        """Write that a row of an array is filled with an array, or with a place of it: `at`.
        Numba's own assignment takes more than a second to compile, for the text of its errors."""
        places = [f"j{axis}" for axis in range(ndim)]
        left, right = ", ".join([row, *places]), ", ".join([*at, *places])
        with ExitStack() as stack:
            for axis, place in enumerate(places):
                stack.enter_context(
                    self.block(f"for {place} in range({target}.shape[{axis + 1}]):")
                )
            value = f"{source}[{right or '()'}]" if source not in self.numbers else source
            self.line(f"{target}[{left}] = {value}")

    # Before the first step

    def write_checks(self) -> None:
        """Write the number of steps, and the checks that keep every read inside its array."""
        lengths = [f"{name}.shape[0]" for name in self.outer.sequences]
        if self.outer.n_steps is not None:
            self.line(f"steps = np.int64({self.outer.n_steps}.item())")
            self.fail_if("steps < 0", StepCountError, self.messages.negative_steps(), "steps")
        else:
            shortest = f"min({', '.join(lengths)})" if len(lengths) > 1 else lengths[0]
            self.line(f"steps = {shortest}")
        for i, length in enumerate(lengths):
            text = self.messages.sequence_length(i)
            self.fail_if(f"{length} != steps", SequenceLengthError, text, length, "steps")
        for i, depth in enumerate(self.signature.depths):
            rows, text = f"{self.outer.initials[i]}.shape[0]", self.messages.initial_rows(i)
            self.fail_if(f"{rows} != {depth}", InitialRowsError, text, rows)

    def write_storage(self) -> None:
        self.line(f"capacity = {f'min(steps, {FIRST_CAPACITY})' if self.grows else 'steps'}")
        for i, name in enumerate(self.outer.carries):
            owned = i in self.body.destroyed
            self.line(f"c{i} = {self.copy_of.format(name) if owned else name}")
        for i, initial in enumerate(self.outer.initials):
            depth, is_ring = self.signature.depths[i], self.signature.untraced[i]
            rows = f"{depth + 1}" if is_ring else f"capacity + {depth}"
            self.new(f"h{i}", f"{initial}.dtype", rows, *self.row_sizes(i))
            for row in range(depth):
                place = f"{row}"
                if self.reverse:  # a ring holds rows in the order of iteration, the latest one last
                    place = f"{depth - 1 - row}" if is_ring else f"steps + {row}"
                self.copy(f"h{i}", place, initial, self.row_ndims[i], str(row))
        for i, type in enumerate(self.outputs):
            self.globals[f"dtype{i}"] = np.dtype(type.dtype).type
            self.new(f"z{i}", f"dtype{i}", *["0"] * (1 + type.ndim))

    def row_sizes(self, i: int) -> list[str]:
        """Return the sizes of a state's rows."""
        return sizes(self.outer.initials[i], 1, self.row_ndims[i])

    # One step

    def write_step(self) -> None:
        with self.block(f"if i % {STEPS_PER_POLL} == 0:"):
            self.line("poll()")
        if self.grows:
            self.write_growth()
        self.line(f"t = {'steps - 1 - i' if self.reverse else 'i'}")
        read = [(name, "t") for name in self.outer.sequences]
        for i, taps in enumerate(self.signature.taps):
            read += [(f"h{i}", self.row(i, offset)) for offset in taps]
        names = [f"y{i}" for i in range(len(read))]
        for name, (array, row), inner in zip(names, read, self.body.fgraph.inputs, strict=False):
            view = f"row_view({array}, {row})"
            self.line(f"{name} = {view if inner.type.ndim else f'{array}[{row}]'}")
            if not inner.type.ndim:
                self.numbers[name] = view
        names += [f"c{i}" for i in range(self.signature.n_carries)]
        results = self.write_graph(self.body.fgraph, [*names, *self.outer.non_sequences])
        made = self.signature.split_body_outputs(results)
        for i, name in enumerate(made.states):
            texts = [self.messages.state_shape(i, axis) for axis in range(self.row_ndims[i])]
            self.store(f"h{i}", self.row(i, 0), name, texts)
        for i, (name, type) in enumerate(zip(made.outputs, self.outputs, strict=True)):
            with self.block("if i == 0:"):
                self.new(f"z{i}", f"dtype{i}", "capacity", *sizes(name, 0, type.ndim))
            texts = [self.messages.output_shape(i, axis) for axis in range(type.ndim)]
            self.store(f"z{i}", "t", name, texts)
        if made.stop is not None:
            self.line(f"stopped = {self.number(made.stop)} != 0")
        if made.carries:
            targets = [f"c{i}" for i in range(self.signature.n_carries)]
            values = [
                f"numba_deepcopy({self.array(name)})" if i in self.body.views else self.array(name)
                for i, name in enumerate(made.carries)
            ]
            self.line(f"{', '.join(targets)} = {', '.join(values)}")

    def store(self, array: str, row: str, value: str, texts: Sequence[str]) -> None:
        """Write a result into a row, after the check that it fits."""
        ndim = len(texts)
        both = zip(sizes(array, 1, ndim), sizes(value, 0, ndim), strict=True)
        for text, (own, given) in zip(texts, both, strict=True):
            # Of a name by itself, numba 0.65 raises the first value.
            self.fail_if(f"{own} != {given}", StepShapeError, text, "+i", own, given)
        self.copy(array, row, value, ndim)

    def row(self, i: int, offset: int) -> str:
        """Return where the row of a state is that is some steps ahead of this step's."""
        depth = self.signature.depths[i]
        if self.signature.untraced[i]:
            return f"(i + {depth + offset}) % {depth + 1}"
        return f"t + {-offset}" if self.reverse else f"t + {depth + offset}"

    def write_growth(self) -> None:
        with self.block("if i == capacity:"):
            self.line("capacity = min(steps, 2 * capacity)")
            for i, depth in enumerate(self.signature.depths):
                if not self.signature.untraced[i]:
                    self.grow(f"h{i}", depth, self.row_ndims[i])
            for i, type in enumerate(self.outputs):
                self.grow(f"z{i}", 0, type.ndim)

    def grow(self, name: str, extra: int, ndim: int) -> None:
        larger = f"larger_{name}"
        self.new(larger, f"{name}.dtype", f"capacity + {extra}", *sizes(name, 1, ndim))
        with self.block(f"for j in range(i + {extra}):"):
            self.copy(larger, "j", name, ndim, "j")
        self.line(f"{name} = {larger}")

    # After the last step

    def write_return(self) -> None:
        signature, n = self.signature, self.signature.required_steps
        if n:
            self.fail_if(f"i < {n}", IndexError, self.messages.missing_steps())
        self.write_empty_outputs()
        results = [self.history(i) for i in range(signature.n_states)]
        for i in range(signature.n_carries):
            owned = i in self.body.destroyed
            results.append(f"c{i}" if owned else self.copy_of.format(f"c{i}"))
        results += [self.taken(f"z{i}", 0) for i in range(signature.n_outputs)]
        self.line(f"return {', '.join(results)}")

    def write_empty_outputs(self) -> None:
        """Write outputs of no rows, which are as wide as those of steps would be."""
        shapes = row_shape_graph(self.op)
        if not shapes.outputs:
            return
        with self.block("if steps == 0:"):
            widths = [self.number(name) for name in self.write_graph(shapes, self.arguments)]
            for i, type in enumerate(self.outputs):
                self.new(f"z{i}", f"dtype{i}", "0", *widths[: type.ndim])
                widths = widths[type.ndim :]

    def history(self, i: int) -> str:
        """Return the rows of a state that are the result."""
        depth = self.signature.depths[i]
        if not self.signature.untraced[i]:
            return self.taken(f"h{i}", depth)
        self.new(f"o{i}", f"h{i}.dtype", str(depth), *self.row_sizes(i))
        for k in range(1, depth + 1):
            row = k - 1 if self.reverse else depth - k
            self.copy(f"o{i}", f"{row}", f"h{i}", self.row_ndims[i], self.row(i, -k))
        return f"o{i}"

    def taken(self, name: str, extra: int) -> str:
        """Return the rows of an array that steps have filled."""
        if not self.signature.has_stop:
            return name
        return f"{name}[steps - i:]" if self.reverse else f"{name}[:i + {extra}]"


def sizes(name: str, first: int, count: int) -> list[str]:
    """Return the sizes of some axes of an array."""
    return [f"{name}.shape[{axis}]" for axis in range(first, first + count)]


# The body of a loop, made ready for compilation


@dataclass
class PreparedBody:
    """A rewritten body. `destroyed` holds the positions of carries whose value a step may
    overwrite; the loop gives those a buffer of their own. The next values of those in `views` may
    be views of what else a step reads, which the loop may overwrite later."""

    fgraph: FunctionGraph
    destroyed: set[int]
    views: set[int]


@brings("body")
def prepare_body(op: Scan) -> PreparedBody:
    """Rewrite a copy of the body with PyTensor's numba rewrites. A step may overwrite nothing but
    carries that nothing else holds: accumulators, random generators."""
    fgraph = thaw_graph(op.body)
    inputs = op.signature.split_body_inputs(fgraph.inputs)
    mutable = {inputs.carries[i] for i in range(op.signature.n_carries) if _owns_its_value(op, i)}
    true_shapes.rewrite(fgraph)
    specs = [In(inp, borrow=True, mutable=inp in mutable) for inp in fgraph.inputs]
    add_supervisor_to_fgraph(fgraph=fgraph, input_specs=specs, accept_inplace=True)
    NUMBA.optimizer.rewrite(fgraph)
    carries = op.signature.split_body_inputs(fgraph.inputs).carries
    next_carries = op.signature.split_body_outputs(fgraph.outputs).carries
    destroyed = set()
    if hasattr(fgraph, "destroyers"):
        destroyed = {i for i, carry in enumerate(carries) if fgraph.destroyers(carry)}
    views = {
        i
        for i, (carry, value) in enumerate(zip(carries, next_carries, strict=True))
        if not _is_fresh(value, carry)
    }
    return PreparedBody(fgraph, destroyed, views)


def _owns_its_value(op: Scan, i: int) -> bool:
    """Whether no other result of a step can share memory with the next value of carry `i`."""
    outputs = op.signature.split_body_outputs(op.body.outputs)
    mine = outputs.carries[i]
    inner = op.signature.split_body_inputs(op.body.inputs).carries[i]
    if is_tensor(mine) and mine.type.ndim == 0:
        return False
    if mine is inner or not _is_fresh(mine, inner):
        return False
    others = [out for out in op.body.outputs if out is not mine]
    shared = sum(out is mine for out in op.body.outputs) > 1
    return not shared and all({mine, inner}.isdisjoint(viewed(out)) for out in others)


def _is_fresh(variable: Variable, own: Variable) -> bool:
    """Whether a value is made by the step, and is no view of anything but the carry itself."""
    last = viewed(variable)[-1]
    return last.owner is not None or last is own


def viewed(variable: Variable) -> list[Variable]:
    """Return a value, and what it is a view of, one after the other."""
    found = [variable]
    while (node := found[-1].owner) is not None:
        viewed = node.op.view_map.get(node.outputs.index(found[-1]))
        if not viewed:
            break
        found.append(node.inputs[viewed[0]])
    return found
