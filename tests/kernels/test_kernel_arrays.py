"""Loops over arrays as kernels, against the plain loop."""

import itertools

import hypothesis
import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.mode import Mode
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.db import RewriteDatabaseQuery
from pytensor.ifelse import ifelse
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.shape import Shape_i

import scanlib
from scanlib.backends.handler.functions import function_address, has_compiled_function
from scanlib.kernels.arrays.decompositions import decompose
from scanlib.kernels.arrays.nests import Tree
from scanlib.kernels.python_driver import compiled_runner
from scanlib.kernels.scalars import NoKernelError
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.row_ops.step_products import StepProducts
from scanlib.ops.scan import Scan
from scanlib.schedules.array_loops import ArrayLoop, array_program, graph_program
from tests.strategies import loops

rng = np.random.default_rng(3)


def evaluated(inputs, outputs, values, rewrites="fast_run"):
    """Yield the loops of a function, with their arguments and the results of the plain loops."""
    with pytensor.config.change_flags(scanlib__perform="python"):
        mode = Mode("py", rewrites).excluding("inplace")
        f = pytensor.function(inputs, outputs, mode=mode, on_unused_input="ignore")
        graph = f.maker.fgraph
        found = {variable: cell.data for variable, cell in zip(graph.inputs, f.input_storage)}  # noqa: B905
        for variable, value in zip(graph.inputs, values, strict=False):
            found[variable] = np.asarray(value, variable.type.dtype)
        for node in graph.toposort():
            given = [found[inp] if inp.owner or inp in found else inp.data for inp in node.inputs]
            cells = [[None] for _ in node.outputs]
            copies = [np.array(x) if isinstance(x, np.ndarray) else x for x in given]
            node.op.perform(node, copies, cells)
            found.update(zip(node.outputs, [cell[0] for cell in cells], strict=True))
            if isinstance(node.op, Scan | ElemwiseScan):
                op = node.op.scan if isinstance(node.op, ElemwiseScan) else node.op
                yield op, given, [np.array(cell[0]) for cell in cells]


def runner(op):
    program = array_program(op)
    return compiled_runner(program, [function_address(node) for node in program.functions])


def agree(op, given, wanted, rtol=1e-10):
    """Run the kernels of a loop, and compare; the inputs stay as they are."""
    before = [np.array(value) for value in given]
    results = runner(op)(*given)
    for result, expected in zip(results, wanted, strict=True):
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        tolerance = 2e-4 if expected.dtype in (np.float32, np.complex64) else rtol
        np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance * 0.1)
    for value, old in zip(given, before, strict=True):
        np.testing.assert_array_equal(value, old)


def check(inputs, outputs, values, rewrites="fast_run", at_least=1):
    count = 0
    for op, given, wanted in evaluated(inputs, outputs, values, rewrites):
        agree(op, given, wanted)
        count += 1
    assert count >= at_least


def scan(*args, **kwargs):
    return scanlib.scan(*args, return_updates=False, **kwargs)


N, T = 5, 7


def drawn(**shapes):
    """Return variables and values; integers where the name starts with ``k``."""
    variables, values = [], []
    for name, shape in shapes.items():
        value = 0.4 * rng.normal(size=shape) if name[0] != "k" else rng.integers(-4, 4, shape)
        variables.append(pt.tensor(name, dtype=value.dtype, shape=(None,) * value.ndim))
        values.append(value)
    return variables, values


# Steps that write items of a state, and whether they may leave the rest of it where it is.
WRITTEN_STEPS = {
    "set": (True, lambda k, x, h: h[k].set(x)),
    "after_reading": (True, lambda k, x, h: h[k].set(0.9 * h[k - 1] + h.sum() + x)),
    "same_item": (True, lambda k, x, h: h[k].set(h[k] * x)),
    "add": (True, lambda k, x, h: h[k].inc(x)),
    "add_twice": (True, lambda k, x, h: h[k].inc(x)[k - 1].inc(2 * x)),
    "read_later": (True, lambda k, x, h: [new := h[k].set(x), new.sum() + new[k]]),
    "read_before": (True, lambda k, x, h: [h[k].set(x), h[1:]]),
    "read_again": (False, lambda k, x, h: [new := h[k].set(x), new.sum() * h]),
    "moved": (False, lambda k, x, h: h[1:].set(h[:-1])),
    "moved_and_scaled": (True, lambda k, x, h: h[1:].set(x * h[:-1])),
    "turned": (False, lambda k, x, h: h[k].set(x)[::-1]),
    "all_items": (True, lambda k, x, h: h * x),
    "all_items_turned": (False, lambda k, x, h: h * h[::-1]),
}


@pytest.mark.all_forms
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("stays, step", WRITTEN_STEPS.values(), ids=WRITTEN_STEPS)
def test_items_that_a_step_writes(stays, step, backwards):
    """A state of which the last row is read is copied only where a step reads what it writes."""
    (k, x, h), values = drawn(k=T, x=T, h=N)
    with_output = isinstance(step(k[0], x[0], h), list)
    info = [h, None] if with_output else h
    found = scan(step, [k, x], info, go_backwards=backwards)
    found = [found[0][-1], found[1]] if with_output else [found[-1]]
    simplified = RewriteDatabaseQuery(include=["scanlib_simplify", "scanlib_simplify_late"])
    ((op, given, wanted),) = evaluated([k, x, h], found, values, simplified)
    assert all(op.signature.untraced)
    assert bool(ArrayLoop(op, False).rings) != stays
    agree(op, given, wanted)


def _table(k, x, h, W):
    row, value = h[k, None], pt.max(h[k - 1])
    return h[k].set(pt.tanh(row @ W)[0] + value), row[0]


@pytest.mark.all_forms
@pytest.mark.parametrize("made_by", ["set", "joined"])
def test_sizes_in_vectors_that_are_written(made_by):
    """Numbers of which a vector is made, joined or set, are known before the first step."""
    (x, h), values = drawn(x=(T, N), h=N)

    def step(x, h):
        if made_by == "set":
            sizes = pt.stack([x.shape[0], 2])[1].set(x.shape[0] - 1)[::-1]
            return h + pt.zeros((sizes[0] + 1,)) + pt.ones(sizes).sum() + x
        first = pt.expand_dims(x.shape[0] - 2, 0)
        sizes = pt.concatenate([first, [2]])
        one, two = pt.split(x, sizes, n_splits=2)
        return h * one.sum() + two.prod()

    for op, given, wanted in evaluated([x, h], [scan(step, x, h)], values, None):
        agree(op, given, wanted)


# The same of a matrix, with what is read besides.
WRITTEN_ROWS = {
    "row": (True, lambda k, x, h, W: (h[k].set(pt.tanh(W @ h[k - 1] + x)), x)),
    "column": (True, lambda k, x, h, W: (h[:, k].set(h[:, k - 1] * x + h[::-1, k]), h[k])),
    "rows": (True, lambda k, x, h, W: (h[1:3].inc(h[0] @ W), h[0:2].sum(0))),
    "table": (True, _table),
    "items": (True, lambda k, x, h, W: (h[k].set(pt.sin(x)), h[pt.stack([k, 1]), [0, 2]])),
    "both_ways": (True, lambda k, x, h, W: (h[k].set(x * h[:, k]), h.T[k])),
    "exchanged": ("but for rows", lambda k, x, h, W: (h[k].set(h[0])[0].set(h[k]), x)),
    "cleared": (
        "but for rows",
        lambda k, x, h, W: (h[k].set(0.0)[k - 1].inc(h[k] * x)[1].inc(h[k]), x),
    ),
    "moved": (False, lambda k, x, h, W: (h[1:].set(h[:-1]), x)),
}


@pytest.mark.all_forms
@pytest.mark.parametrize("stays, step", WRITTEN_ROWS.values(), ids=WRITTEN_ROWS)
def test_rows_that_a_step_writes(stays, step):
    """Rows that were read are read before others take their place; no more is copied."""
    (k, x, h, W), values = drawn(k=T, x=(T, N), h=(N, N), W=(N, N))
    table, read = scan(step, [k, x], [h, None], W)
    simplified = RewriteDatabaseQuery(include=["scanlib_simplify", "scanlib_simplify_late"])
    found = evaluated([k, x, h, W], [table[-1], read], values, simplified)
    ((op, given, wanted),) = found
    assert bool(ArrayLoop(op, False).rings) != bool(stays)
    (run,) = array_program(op).kernels.run
    assert stays is not True or "move" not in str(run)
    agree(op, given, wanted)


@hypothesis.given(hypothesis.strategies.data())
def test_generated_writes(data):
    """Views of a state and results of them, read before and after parts of it are written."""
    (k, x, h), values = drawn(k=T, x=(T, N), h=(N, N))
    vectors_of = {
        "row": lambda a, k, i: a[k],
        "column": lambda a, k, i: a[:, i],
        "diagonal": lambda a, k, i: a.diagonal(),
        "largest": lambda a, k, i: a.max(i % 2),
        "product": lambda a, k, i: a @ a[i],
        "item": lambda a, k, i: a[i, k] * a[0],
        "places": lambda a, k, i: a[pt.arange(N)[::-1], k],
    }
    made = {"as it is": lambda v: v, "turned": lambda v: v[::-1], "sine": pt.sin}
    written = {
        "row": lambda a, v, k, i: a[k].set(v),
        "column": lambda a, v, k, i: a[:, i].inc(v),
        "places": lambda a, v, k, i: a[:, pt.stack([k, i])].set(v[:, None]),
        "turned": lambda a, v, k, i: a.T[i].set(v).T,
    }
    plan = []
    for _ in range(data.draw(hypothesis.strategies.integers(3, 8))):
        kinds = data.draw(hypothesis.strategies.sampled_from([vectors_of, made, written]))
        name = data.draw(hypothesis.strategies.sampled_from(sorted(kinds)))
        which = data.draw(
            hypothesis.strategies.tuples(*[hypothesis.strategies.integers(0, N - 1)] * 3)
        )
        plan.append((kinds, name, which))

    def step(k, x, h):
        arrays, vectors = [h], [x]
        for kinds, name, (i, j, place) in plan:
            vector, array = vectors[-1 - i % len(vectors)], arrays[j % len(arrays)]
            if kinds is made:
                vectors.append(made[name](vector))
            elif kinds is vectors_of:
                vectors.append(vectors_of[name](array, k, place))
            else:
                arrays.append(written[name](arrays[-1], vector, k, place))
        return 0.9 * arrays[-1] if plan[0][2][0] else arrays[-1], vectors[-1]

    table, read = scan(step, [k, x], [h, None])
    check([k, x, h], [table[-1], read], values)


def test_items_are_written_where_outputs_grow():
    """The state stays where it is when there is room for more rows of an output."""
    k, h = pt.lvector("k"), pt.lvector("h")

    def step(k, h):
        new = h[k].inc(1)
        return [new, new[k]], scanlib.until(new[k] > 50)

    table, counts = scan(step, k, [h, None])
    values = np.arange(200) % 3, np.zeros(3, int)
    ((op, given, wanted),) = evaluated([k, h], [table[-1], counts], values)
    assert not ArrayLoop(op, False).rings
    assert wanted[1].shape == (151,)
    agree(op, given, wanted)


# Steps of a vector `x`, indices `k` and a state, with what the state is: a vector or a matrix.
VECTOR_STEPS = {
    "flip": lambda x, k, h: pt.tanh(h[::-1] * x + h.sum()),
    "shift": lambda x, k, h: pt.concatenate([h[1:], x[:1]]) * 0.9,
    "outer": lambda x, k, h: (pt.outer(h, x) + 1).sum(1) / 5 + pt.max(h),
    "take": lambda x, k, h: h[k] * 0.9 + x,
    "set": lambda x, k, h: pt.set_subtensor(h[k], x) * 0.9,
    "add": lambda x, k, h: pt.inc_subtensor(h[k], x) * 0.7,
    "add_number": lambda x, k, h: pt.inc_subtensor(h[k], x[0]) * 0.7,
    "set_span": lambda x, k, h: pt.set_subtensor(h[1:3], x[:2])[::-1],
    "set_steps": lambda x, k, h: pt.set_subtensor(h[::2], x[:3])[::-1],
    "item": lambda x, k, h: pt.inc_subtensor(h[k[0]], x[k[1]])[::-1] * 0.5,
    "slices": lambda x, k, h: (
        pt.concatenate([h[::2], x[::-2]])[:5] * 0.5
        + h[4:0:-1].sum()
        + h[-2::-3].sum()
        + h[1:-1:2].sum()
        + h[:-7:-1].sum()
        + h[9:1:-2].sum()
        + h[-9:9:3].sum()
    ),
    "split": lambda x, k, h: pt.concatenate(pt.split(h, [2, 3], n_splits=2)[::-1]) * 0.9 + x,
    "cumulative": lambda x, k, h: pt.cumsum(h) * 0.2 + pt.cumprod(x),
    "range": lambda x, k, h: pt.arange(2, 12, 2) * h[::-1] * 0.1 + pt.arange(h.shape[0]),
    "repeat": lambda x, k, h: pt.repeat(h[:1], N) + pt.tile(x[:1], N) + pt.roll(h, 2) * 0.3,
    "dots": lambda x, k, h: pt.stack([h, x]).T @ pt.stack([h @ x, x.sum()]) * 0.1,
    "numbers": lambda x, k, h: (pt.stack([h[0], x[1], h.mean(), 1.0, 2.0]) + h.size)[::-1] * 0.3,
    "choices": lambda x, k, h: ifelse(x[0] > 0, h[::-1], x) * 0.9 + ifelse(k[0] > 0, h[0], x[1]),
    "median": lambda x, k, h: pt.median(h) * x + pt.median(h[1:]),
    "sort": lambda x, k, h: pt.sort(h * x)[::-1] * 0.9 + pt.sort(k) * h,
    "argsort": lambda x, k, h: (
        h[pt.argsort(x + h)] * 0.9 + pt.argsort(pt.argsort(k, stable=True)) * x
    ),
    "search": lambda x, k, h: (
        h[pt.minimum(pt.searchsorted(pt.cumsum(pt.exp(x)), pt.exp(h)), N - 1)] * 0.9
        + pt.searchsorted(h[1:], x[0], side="right")
    ),
    "variance": lambda x, k, h: (h - h.mean()) / (1 + h.std()) + pt.prod(x) + h[::-1],
}
MATRIX_STEPS = {
    "diagonal": lambda x, k, h: pt.set_subtensor(h[pt.arange(N), pt.arange(N)], x) * 0.9 + h.T,
    "diagonals": lambda x, k, h: (pt.diag(x) + pt.eye(N)) @ h * 0.5 + pt.diag(h),
    "side_diagonals": lambda x, k, h: (
        pt.diag(pt.diag(h, 1) * 0.5, 1) + pt.diag(pt.diag(h, -2), -2) + pt.diag(h, 9).sum() + x
    ),
    "triangles": lambda x, k, h: pt.triu(h) @ pt.tril(h) * 0.3 + x,
    "columns": lambda x, k, h: h[:, k] * 0.9 + x,
    "pairs": lambda x, k, h: h[k, k[::-1]] + h[k[:, None], k[None, :]] * 0.5 + x,
    "far": lambda x, k, h: h[None, :, :].T[k, :, pt.zeros_like(k)] * 0.4 + x,
    "set_pairs": lambda x, k, h: pt.set_subtensor(h[k, k[::-1]], x).T * 0.9,
    "add_rows": lambda x, k, h: pt.inc_subtensor(h[k], x).T * 0.3,
    "add_columns": lambda x, k, h: pt.inc_subtensor(h[:, k], x[:, None]).T * 0.3,
    "products": lambda x, k, h: h @ h.T @ h * 0.1 + pt.outer(x, x),
    "batches": lambda x, k, h: pt.tanh((h[:, :, None] @ h[:, None, :])[:, 0, ::-1] + x),
    "batched_dots": lambda x, k, h: (
        pt.vectorize(lambda a, b: a @ b, "(n),(n)->()")(h, x)[:, None] + h[::-1] * 0.3
    ),
    "cumulative": lambda x, k, h: pt.cumsum(h, 0) * 0.2 + pt.cumsum(h, 1) * 0.1 + x,
    "sorts": lambda x, k, h: pt.sort(h, 0) * 0.5 + pt.sort(h.T, 1)[::-1] * x + pt.argsort(h, 0) * x,
    "softmax": lambda x, k, h: pt.special.softmax(h, axis=1) + pt.special.softmax(h, axis=0) * x,
    "sums": lambda x, k, h: pt.logsumexp(h, axis=1, keepdims=True) + h.sum(0) * 0.1 + h.T.mean(),
    "extremes": lambda x, k, h: pt.max(h, 1, keepdims=True) + h.min(0) + h[::-1] * 0.1 + h.max(),
    "reshape": lambda x, k, h: (
        h.T.reshape(h.shape) * 0.8 + h.flatten()[:N] + h[1:].reshape((-1,))[0]
    ),
    "dims": lambda x, k, h: pt.split_dims(pt.join_dims(h, 0, 2)[::-1], shape=h.shape, axis=0) * 0.8,
    "determinants": lambda x, k, h: (
        h * 0.5 + pt.linalg.det(h) + x * pt.prod(pt.linalg.slogdet(h + pt.eye(N)))
    ),
    "joins": lambda x, k, h: (
        pt.concatenate([h[:2] * 0.5, pt.tanh(h[2:] + x)])
        + pt.concatenate([pt.exp(-(h[:, :1] ** 2)), h[:, 1:] * x[1:]], axis=1) * 0.3
    ),
    "padded": lambda x, k, h: (
        pt.pad(h, 1)[2:, 1:-1] * 0.4 + pt.pad(h, ((2, 0), (0, 1)), constant_values=0.5)[:-2, 1:] * x
    ),
    "filled": lambda x, k, h: (
        pt.fill_diagonal(h, x[0]).T * 0.9 + pt.fill_diagonal(h[:, 2:], 1.0).sum()
    ),
    "edges": lambda x, k, h: (
        pt.pad(h, 1, mode="edge")[2:, 1:-1] * 0.4 + pt.pad(h, 2, mode="wrap")[:-4, 4:] * x
    ),
    "blocks": lambda x, k, h: pt.linalg.block_diag(h[:2], h[2:])[:, : h.shape[1]] * 0.9 + x,
    "kron": lambda x, k, h: pt.linalg.kron(h[:1, :1], h) * 0.5 + x,
    "last": lambda x, k, h: pt.concatenate([h[1:], x[None]]) * pt.abs(h).max(axis=(0, 1)),
}


@pytest.mark.parametrize("name", VECTOR_STEPS)
@pytest.mark.parametrize("backwards", [False, True])
def test_vectors(name, backwards):
    (x, k, h), values = drawn(x=(T, N), k=(T, N), h=(N,))
    y = scan(VECTOR_STEPS[name], [x, k], [h], go_backwards=backwards)
    cost = (y**2).sum()
    check([x, k, h], [y, *pytensor.grad(cost, [x, h], disconnected_inputs="ignore")], values)


@pytest.mark.parametrize("name", MATRIX_STEPS)
def test_matrices(name):
    (x, k, h), values = drawn(x=(T, N), k=(T, N), h=(N, N))
    y = scan(MATRIX_STEPS[name], [x, k], [h])
    cost = (y**2).sum()
    check([x, k, h], [y, *pytensor.grad(cost, [x, h], disconnected_inputs="ignore")], values)


@pytest.mark.parametrize("offset", [-1, 0, 2])
@pytest.mark.parametrize("axes", [(0, 1), (0, 2), (2, 1)])
def test_diagonals_of_matrices_side_by_side(axes, offset):
    (h,), values = drawn(h=(3, 4, 5))

    def step(h):
        return h * 0.9, pt.diagonal(pt.sin(h), offset, *axes)

    check([h], [scan(step, None, [h, None], n_steps=T)[1]], values)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 8, 9, 33])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_sizes(size, static, steps):
    shape = (size if static else None,)
    x, h = pt.tensor("x", shape=(None, *shape)), pt.tensor("h", shape=shape)
    values = [rng.normal(size=(steps, size)), rng.normal(size=size)]

    def step(x, h):
        return pt.tanh(h[::-1]) + x * h.sum(), (h * x).sum(), pt.outer(h, x)

    ys = scan(step, x, [h, None, None])
    check([x, h], ys, values)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("static", [False, True])
def test_matrices_of_all_steps_are_packed(static, dtype):
    shapes = {"x": (3, 35, 19), "h": (35, 35), "W": (35, 35), "U": (19, 35)}
    variables = {
        name: pt.tensor(name, shape=shape if static else (None,) * len(shape), dtype=dtype)
        for name, shape in shapes.items()
    }
    x, h, W, U = variables.values()
    values = [0.3 * rng.normal(size=shape).astype(dtype) for shape in shapes.values()]
    y = scan(lambda x, h, W, U: pt.tanh(h @ W + x @ U - h @ W.T), x, [h], [W, U])
    small = [3 * values[0][:, :2], values[1][:2], *values[2:]]
    for given in [values] if static else [values, small]:
        check([x, h, W, U], [y, *pytensor.grad((y**2).sum(), [W, U])], given)


# Steps, rows, inner size and columns.
MATRICES = [(5, 3, 4, 2), (0, 3, 4, 2), (2, 3, 0, 2), (2, 0, 3, 4), (4, 1, 3, 9), (6, 13, 1, 14)]
MATRICES += [(4, 13, 5, 1), (3, 33, 20, 17), (2, 70, 65, 66), (300, 4, 4, 4), (40, 16, 3, 18)]


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "int8", "complex128"])
@pytest.mark.parametrize("static", [False, True])
def test_sums_of_products_of_all_steps(static, dtype):
    """One product, of copies if need be, or one for each step."""
    program = None
    for sizes in MATRICES:
        steps, m, d, n = sizes
        shapes = (
            {"x": (None, m, d), "y": (None, d, n)} if static else dict.fromkeys("xy", (None,) * 3)
        )
        if program is None or static:
            x, y = (pt.tensor(name, shape=shape, dtype=dtype) for name, shape in shapes.items())
            sums = [StepProducts(total=True)(*pair) for pair in [(x, y), (y.mT, x.mT)]]
            graph = graph_program(FunctionGraph([x, y], sums))
            program = compiled_runner(graph, [function_address(own) for own in graph.functions])
        given = [
            (3 * rng.normal(size=shape)).astype(dtype) for shape in [(steps, m, d), (steps, d, n)]
        ]
        turned = [np.ascontiguousarray(value.swapaxes(1, 2)).swapaxes(1, 2) for value in given]
        wanted = np.einsum("tij,tjk->ik", *given)
        tolerance = 1e-3 if dtype == "float32" else 1e-10
        for one, other in itertools.product(*zip(given, turned, strict=True)):
            found, transposed = program(one, other)
            np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)
            np.testing.assert_allclose(transposed, wanted.T, rtol=tolerance, atol=tolerance)


LAYOUTS = {
    "strided": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "reversed": lambda a: a[..., ::-1].copy()[..., ::-1],
    "backwards": lambda a: a[::-1].copy()[::-1],
    "fortran": np.asfortranarray,
    "transposed": lambda a: np.ascontiguousarray(a.T).T,
    "repeated": lambda a: np.broadcast_to(a[..., :1], a.shape),
    "same_rows": lambda a: np.broadcast_to(a[:1], a.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_inputs(layout):
    (x, h, a), values = drawn(x=(T, N), h=(N,), a=(N, N))

    def step(x, h, a):
        return pt.tanh(a @ h[::-1] + x) + a[1]

    y = scan(step, x, [h], [a])
    for op, given, wanted in evaluated([x, h, a], [y, y[-1]], values):
        arranged = [LAYOUTS[layout](v) if v.ndim else v for v in given]
        if layout in ("repeated", "same_rows"):
            with pytensor.config.change_flags(scanlib__perform="python"):
                node = op.make_node(*[pt.as_tensor(v) for v in arranged])
                cells = [[None] for _ in node.outputs]
                op.perform(node, [np.array(v) for v in arranged], cells)
            wanted = [cell[0] for cell in cells]
        agree(op, arranged, wanted)


def test_the_same_array_twice():
    (x, h), values = drawn(x=(N, N), h=(N,))
    y = scan(lambda u, h, a, b: pt.tanh(a @ h[::-1] + b.T @ u), x, [h], [x, x.T])
    for op, given, wanted in evaluated([x, h], [y], values):
        agree(op, given, wanted)
        same = [values[0] if v.shape == (N, N) and (v == values[0]).all() else v for v in given]
        agree(op, same, wanted)


def test_results_that_are_operands_or_the_same():
    (x, h, a), values = drawn(x=(T, N), h=(N,), a=(N,))

    def step(x, h, g, a):
        new = pt.tanh(h[::-1] + g * x)
        return new, h, new, new[::-1], x, a, h[1:3]

    ys = scan(step, x, [h, a, None, None, None, None, None], [a])
    check([x, h, a], ys, values)


@pytest.mark.parametrize("taps", [[-1], [-2], [-3, -1], [-1, -2, -4]])
@pytest.mark.parametrize("whole", [False, True])
def test_taps(taps, whole):
    (x, h), values = drawn(x=(T, N), h=(-min(taps), N))

    def step(x, *past):
        return pt.tanh(sum((k + 1) * p[::-1] for k, p in enumerate(past)) + x)

    y = scan(step, x, [{"initial": h, "taps": taps}])
    check([x, h], [y if whole else y[-1]], values)


@pytest.mark.parametrize("n_steps", [0, 1, 2, 5, 200])
@pytest.mark.parametrize("bound", [3.5, 1e9])
def test_until(n_steps, bound):
    (h,), values = drawn(h=(N,))

    def step(h):
        new = h[::-1] + 0.5
        return (new, new.sum()), scanlib.until(new.max() > bound)

    y, z = scan(step, None, [h, None], n_steps=n_steps)
    check([h], [y, z], values)
    check([h], [y[-1]], values) if n_steps else None


SHAPES = {"x": (None, None), "h": (None,)}
DTYPES = ["int8", "int64", "uint8", "bool", "float32", "float64", "complex128"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype):
    kind = np.dtype(dtype).kind
    x, h = (
        pt.tensor("x", dtype=dtype, shape=(None, None)),
        pt.tensor("h", dtype=dtype, shape=(None,)),
    )
    values = [(50 * rng.normal(size=shape)).astype(dtype) for shape in [(T, N), (N,)]]

    def step(x, h):
        if kind == "b":
            return h[::-1] ^ x, h.any(), pt.all(x), pt.concatenate([h, x])
        new = h[::-1] - x if kind in "fc" else (h[::-1] + x if kind == "u" else h[::-1] * 3 + x)
        results = [new.astype(dtype), h.sum(), x.prod(dtype="float64") if kind != "c" else x.sum()]
        return [*results, pt.concatenate([h, x])]

    ys = scan(step, x, [h, None, None, None])
    check([x, h], ys, values)


def test_choices_of_complex_numbers():
    x, h = pt.zmatrix("x"), pt.zvector("h")

    def step(x, h):
        number = ifelse(x[0].real > 0, h[0] * x[1], x[2])
        return ifelse(x[1].imag > 0, h[::-1] * x, x + number), number

    values = [rng.normal(size=(T, N, 2)).view(complex)[..., 0], np.arange(N) * (1 - 0.5j)]
    check([x, h], scan(step, x, [h, None]), values)


@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (2, 200)])
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("reduce", [pt.sum, pt.max])
def test_reductions_of_numbers_alone(shape, axis, reduce):
    """All that is read is the same at every index: there is no array to walk along."""
    x, h = pt.dvector("x"), pt.dscalar("h")

    def step(x, h):
        found = reduce(pt.tanh(h + np.ones(shape)), axis=axis)
        return pt.atleast_1d(found)[::-1][0] * 0.01 + x

    y = scan(step, x, [h])
    check([x, h], [y], [rng.normal(size=T), np.float64(0.3)], rewrites="fast_compile")


# Of members `x`, `H` with a short last axis and some numbers `w`: an array of all three axes.
SHORT_LAST_AXES = {
    "outer": lambda x, w, H: x[:, None] - w,
    "three axes": lambda x, w, H: (x[None, :, None] - w) * pt.exp(-w)[None, None, ::-1],
    "with rows": lambda x, w, H: pt.tanh(x[:, None] * w) + H,
    "of whole columns": lambda x, w, H: pt.tanh(H.T.reshape((3, -1)).T * w) * x[:, None],
    "choices": lambda x, w, H: pt.switch(x[:, None] > w, x[:, None] * w, H.T.T),
    "shares": lambda x, w, H: pt.special.softmax(x[:, None] * w, axis=1) * x[:, None],
}


@pytest.mark.parametrize("name", SHORT_LAST_AXES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("members", [0, 1, 8, 13])
def test_short_last_axes(name, dtype, members):
    x, H = pt.vector("x", dtype=dtype), pt.tensor("H", dtype=dtype, shape=(None, 3))
    w = pt.tensor("w", dtype=dtype, shape=(3,))

    def step(w, H, x):
        found = SHORT_LAST_AXES[name](x, w, H)
        found = found if found.ndim == 3 else found[None]
        members = found.sum(axis=(0, 2))
        own = found.sum(axis=(0, 1)) + (found * members[:, None]).max(axis=2).sum()
        top = pt.concatenate([found[0].max(axis=1), x[:1]])[: x.shape[0]]
        return own / 8, found[0] / (1 + abs(top[:, None])), (found**2).sum() + found[0].T

    traces = scan(step, None, [w, H, None], non_sequences=[x], n_steps=3)
    values = [rng.normal(size=n) / 2 for n in (3, (members, 3), members)]
    check([w, H, x], traces, values)


def test_transposes_are_walked_as_they_lie(monkeypatch):
    """What elementwise Ops make of transposes lies as these do, as in ``x @ (H + u[:, None])``."""
    (H, G, x, u), values = drawn(H=(13, 11), G=(11, 13), x=(13,), u=(11,))
    has_columns, long = Tree.has_columns, []

    def noted(tree):
        by_columns = has_columns(tree)
        long.append(by_columns and not isinstance(tree.shape()[-1], int))
        return by_columns

    monkeypatch.setattr(Tree, "has_columns", noted)

    def step(H, x, u):
        matrix = pt.tanh(H.T + u[:, None]) * x
        stack = H.T[None] * u[None, :, None] * pt.exp(x)[None, None, ::-1][..., ::-1]
        rows = stack.sum(axis=2) + stack.max(axis=(0, 2)) + matrix.sum(axis=1)
        both = (matrix + G).sum(axis=0)
        product = x @ (H * x[:, None])
        return 0.5 * pt.tanh(matrix + product[:, None]).T, matrix @ x + rows[0], both.sum()

    traces = scan(step, None, [H, None, None], non_sequences=[x, u], n_steps=3)
    check([H, G, x, u], traces, values)
    assert any(long)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_powers(dtype):
    """Those with a known exponent, a whole number or half of one, are products, and of a root."""
    exponents = np.array([-64, -3, -2.5, -1.5, -1, 0, 1, 1.5, 2, 2.5, 3, 31, 65, 0.3], dtype)
    x, h = pt.vector("x", dtype=dtype), pt.vector("h", dtype=dtype)

    def step(h, x):
        return h[::-1], pt.stack([(h[0] * x) ** exponent for exponent in exponents])

    traces = scan(step, None, [h, None], non_sequences=[x], n_steps=2)
    values = [0.0, -0.0, 1.02, -0.97, 40.0, np.inf, -np.inf, np.nan]
    with np.errstate(all="ignore"):
        check([h, x], traces, [np.array([1.0, -1.0]), values])


def test_sums_are_collected_in_the_dtype_that_is_asked_for():
    x, h = pt.fmatrix("x"), pt.fvector("h")
    values = [np.full((2, 4), 1e8, "float32"), np.array([1, 3e8, 1, -3e8], "float32")]

    def step(x, h):
        total = h.sum(acc_dtype="float64")
        rows = pt.stack([h, h]).sum(axis=1, acc_dtype="float64")
        return h[::-1] * 1, total, rows, pt.outer(h, h).sum(0, acc_dtype="float64", dtype="float32")

    ys = scan(step, x, [h, None, None, None])
    check([x, h], ys, values)


def test_writes_and_joins_of_other_dtypes():
    (x, h), values = drawn(x=(T, N), h=(N,))
    f = pt.fvector("f")

    def step(x, h, f):
        new = pt.inc_subtensor(h[1:3], f[:2])[::-1] * 0.5
        return pt.concatenate([new[:3], f[3:]]), pt.set_subtensor(h[pt.argmax(x)], f[0])

    ys = scan(step, x, [h, None], [f])
    check([x, h, f], ys, [*values, np.arange(5, dtype="float32")])


@pytest.mark.parametrize("write", [pt.set_subtensor, pt.inc_subtensor])
@pytest.mark.parametrize("shape", [(5,), (2, 5)])
def test_one_item_is_written_to_a_whole_slice(write, shape):
    """As NumPy does it, also where the graph does not know that there is one."""
    (x, h), (rows, first) = drawn(x=(T, 3), h=shape)
    y = scan(lambda x, h: pt.tanh(write(h[..., 1:4], x)), x, [h])
    check([x, h], [y], [rows[:, :1], first])
    check([x, h], [y], [rows, first])
    with pytest.raises(ValueError, match="sizes 2 and 3"):
        pytensor.function([x, h], y)(rows[:, :2], first)


@pytest.mark.parametrize("dtype", ["float64", "int64", "bool"])
def test_places_of_the_largest(dtype):
    h = pt.tensor("h", dtype=dtype, shape=(None, None))
    value = rng.integers(0, 2 if dtype == "bool" else 4, (3, 4)).astype(dtype)
    if dtype == "float64":
        value[1, 2:] = np.nan
    y, *found = scan(
        lambda h: [h[:, ::-1], pt.argmax(h), pt.argmax(h, 0), pt.argmax(h, 1), pt.argmax(h[1:].T)],
        None,
        [h, None, None, None, None],
        n_steps=4,
    )
    check([h], [y, *found], [value])


@pytest.mark.parametrize("dtype", ["float64", "float32", "int8", "bool", "complex64"])
@pytest.mark.parametrize("shape", [(3, 13), (2, 3, 5), (4, 1, 8), (2, 3, 40)])
def test_reductions_of_short_rows_of_known_size(dtype, shape):
    h = pt.tensor("h", dtype=dtype, shape=shape)
    value = rng.normal(size=shape) * (rng.random(shape) < 0.7)
    kinds = [pt.sum, pt.prod]
    if dtype == "bool":
        kinds += [pt.any, pt.all]
    elif dtype != "complex64":
        kinds += [pt.max, pt.min]
    if dtype == "float64":
        value[0, 0, ...] = np.nan
        kinds += [lambda h, axis: pt.gammaln(h).sum(axis=axis)]  # of which none takes several
    y, *found = scan(
        lambda h: [h * h[::-1], *(kind(h, axis=len(shape) - 2) for kind in kinds)],
        None,
        [h, *[None] * len(kinds)],
        n_steps=2,
    )
    check([h], [y, *found], [value.astype(dtype)])


@pytest.mark.parametrize("dtype", ["float32", "int64", "complex128"])
def test_sums_and_products_of_all_before(dtype):
    h = pt.tensor("h", dtype=dtype, shape=(None,))
    y, *found = scan(
        lambda h: [h[::-1], pt.cumsum(h), pt.cumsum(h[::-2]), pt.cumprod(h)],
        None,
        [h, None, None, None],
        n_steps=2,
    )
    for row in ([], [-0.0], [-0.0, -0.0, 1, 3, np.nan, 2], [1, np.inf, -np.inf, 1, 0]):
        numbers = np.nan_to_num(row, posinf=7, neginf=1) if np.dtype(dtype).kind in "iu" else row
        check([h], [y, *found], [np.asarray(numbers).astype(dtype)])


def test_sizes_that_a_batch_of_nothing_reads():
    """`vectorize_graph` leaves the size of an array in a node for batches, without a batch."""
    size = Blockwise(Shape_i(1), signature="(i,j)->()")
    x = pt.tensor3("x")
    y = scan(lambda x: pt.cumsum(x, axis=0) * size(x), x)
    check([x], [y], [rng.normal(size=(3, 2, 4))], "fast_compile")


def test_sizes_of_what_is_computed_where_it_is_read():
    (x, h), values = drawn(x=(T, N), h=(N,))

    def step(x, h):
        read, unread = pt.tanh(h) * x, pt.exp(h) + x
        zeros = pt.zeros(Shape_i(0)(read) - Shape_i(0)(unread) + 3)
        return pt.concatenate([read * 0.5, zeros])[:N][::-1] + h

    check([x, h], [scan(step, x, [h])], values, "fast_compile")


def test_gradients_of_products_with_zeros():
    (x, h), values = drawn(x=(T, N), h=(N, N))
    values[1][0] = values[1][:2, 1] = 0.0

    def step(x, h):
        factors = pt.switch(h > 0.3, 0.0, h)
        return pytensor.grad(pt.prod(factors, axis=0).sum(), factors) * 0.5 + h[::-1] * x

    for op, given, wanted in evaluated([x, h], scan(step, x, [h]), values):
        agree(op, given, wanted)
        assert not array_program(op).functions  # numba would compile one, in seconds


def test_no_steps_leave_an_initial_value_of_another_shape_alone():
    x, start = pt.vector("x"), pt.matrix("start")
    last, _ = scanlib.loop(
        lambda h, v: (pt.tanh(pt.roll(h, 1) + pt.broadcast_to(v, (8, 3))), None), start, x
    )
    f = pytensor.function([x, start], last)
    for rows in (20, 8, 1):
        given = 1.0 + np.arange(3.0 * rows).reshape(rows, 3)
        np.testing.assert_array_equal(f([], given), given)


def test_what_a_graph_in_a_node_is_given_is_computed_once():
    x = pt.dvector("x")
    inner = pt.dvector("inner")
    pair = OpFromGraph([inner], [inner + 1, inner * inner])
    exponential = pt.exp(x)
    outputs = [exponential, *pair(exponential), *pair(2 * exponential)]
    graph = FunctionGraph([x], outputs, clone=True)
    before = sum(isinstance(node.op, Elemwise) for node in graph.apply_nodes)
    decompose(graph)
    assert sum(isinstance(node.op, Elemwise) for node in graph.apply_nodes) == before + 2 * 2
    value = np.array([0.5, -1.0])
    e = np.exp(value)
    wanted = [e, e + 1, e * e, 2 * e + 1, 4 * e * e]
    found = pytensor.function(graph.inputs, graph.outputs, mode="FAST_COMPILE")(value)
    for own, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-14)


@pytest.mark.parametrize("place", [5, -6])
def test_indices_are_checked(place):
    (x, k, h), values = drawn(x=(T, N), k=(T, N), h=(N,))
    values[1][2, 3] = place
    for step in (VECTOR_STEPS["take"], VECTOR_STEPS["add"]):
        y = scan(step, [x, k], [h])
        ((op, arguments, _),) = evaluated([x, k, h], [y], [values[0], values[1] * 0, values[2]])
        arrays = [values[1] if v.dtype.kind == "i" and v.ndim else v for v in arguments]
        with pytest.raises(IndexError, match="out of bounds"):
            runner(op)(*arrays)


@hypothesis.given(loops(dtypes=("float64", "float32", "int64", "int32", "int8", "bool")))
def test_generated_loops(case):
    values = case.values()
    rendered = case.render(scanlib.scan, scanlib.until, values)
    inputs, given = list(rendered.inputs), list(rendered.inputs.values())
    for op, arrays, wanted in evaluated(inputs, rendered.traces, given):
        try:
            program = array_program(op)
        except NoKernelError:
            continue
        if all(map(has_compiled_function, program.functions)):
            agree(op, arrays, wanted, rtol=1e-6)


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("columns", [0, 3])
def test_solves_read_one_triangle_of_a_symmetric_matrix(lower, columns):
    (A, h), values = drawn(x=(N, N), h=(N, columns) if columns else (N,))

    def step(h, A):
        z = pt.linalg.solve(A, h, assume_a="sym", lower=lower, b_ndim=h.ndim)
        return z / (1 + abs(z).sum())

    check([A, h], scan(step, None, [h], [A], n_steps=4), values)


@pytest.mark.parametrize("slices", ["read", "written"])
def test_slices_between_computed_places(slices, mode):
    """Of a length that is specified, or that of what is written; counted from the end as well."""
    places, x = pt.lvector("places"), pt.dvector("x")

    def step(k, h):
        if slices == "read":
            return h[k].set(pt.specify_shape(h[k : k + 3], 3).sum())
        return h[k : k + 3].set(h[:3] + pt.arange(3))

    def plain(h, places):
        for k in places:
            if slices == "read":
                h[k] = h[k : k + 3].sum()
            else:
                h[k : k + 3] = h[:3] + np.arange(3)
        return h

    trace = scan(step, places, [x])
    function = pytensor.function([places, x], trace[-1], mode=mode)
    data, given = np.linspace(-1, 1, 9), np.array([0, 1, 5, 6, -9, -4])
    np.testing.assert_allclose(function(given, data), plain(data.copy(), given))
