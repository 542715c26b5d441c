"""One handler for all loop programs: NumPy arrays of any kind, PyTensor's C linker, XLA."""

import signal
import threading
import time

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import OPT_FAST_RUN, Mode
from pytensor.configdefaults import config
from pytensor.scalar import float64
from pytensor.scalar.loop import ScalarLoop
from pytensor.tensor.elemwise import Elemwise

import scanlib
from scanlib.backends.handler import thunks
from scanlib.backends.handler.programs import address, program_of, registered
from scanlib.backends.handler.thunks import Thunk, library, runner
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from tests.exploration import explore, half
from tests.modes import MODES
from tests.strategies import loops

pytestmark = pytest.mark.skipif(not config.cxx, reason="no C++ compiler")
rng = np.random.default_rng(3)


def scan(*arguments, **options):
    return scanlib.scan(*arguments, return_updates=False, **options)


def nodes_of(inputs, outputs, values):
    """Return the loops of a function that have programs, with the values of their inputs."""
    found = []
    known = {v: np.asarray(x, v.type.dtype) for v, x in zip(inputs, values, strict=True)}
    with pytensor.config.change_flags(scanlib__perform="python"):
        f = pytensor.function(
            inputs, outputs, mode=Mode("py", OPT_FAST_RUN), on_unused_input="ignore"
        )
        graph = f.maker.fgraph
        known = dict(zip(graph.inputs, known.values(), strict=False))
        for cell, variable in zip(f.input_storage, graph.inputs, strict=True):
            known.setdefault(variable, cell.data)
        for node in graph.toposort():
            own = [known[v] if v.owner or v in known else v.data for v in node.inputs]
            results = [[None] for _ in node.outputs]
            node.op.perform(node, own, results)
            known.update((v, r[0]) for v, r in zip(node.outputs, results, strict=True))
            if isinstance(node.op, ElemwiseScan) and program_of(node.op) is not None:
                found.append((node, own))
    return found


def tanh_loop(steps=6, channels=5):
    x, w = pt.dmatrix(), pt.dvector()
    h = scan(lambda x, h, w: pt.tanh(w * h + x), x, [pt.zeros_like(w)], [w])
    data = rng.normal(size=(steps, channels)), rng.normal(size=channels)
    ((node, own),) = nodes_of([x, w], [h], data)
    return node, own


def values_of(node, linker, values):
    """Return what a linker makes of one node."""
    inputs = [variable.type() for variable in node.inputs]
    mode = Mode(linker, None)
    f = pytensor.function(inputs, node.op.make_node(*inputs).outputs, mode=mode)
    return [np.asarray(value) for value in f(*values)]


def assert_same_bits(node, values, linkers):
    first, *others = (values_of(node, linker, values) for linker in linkers)
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert one.dtype == two.dtype
            assert one.shape == two.shape
            assert one.tobytes() == two.tobytes()


def check_bits(case):
    values = case.values()
    loop = case.render(scanlib.scan, scanlib.until, values)
    for node, own in nodes_of(list(loop.inputs), loop.traces, list(loop.inputs.values())):
        assert_same_bits(node, own, ["numba", "cvm", "py", "vm"])


@pytest.mark.parametrize("shard", half(500, 504))
def test_all_linkers_give_the_same_bits(shard):
    explore(loops(), check_bits, shard, 30)


def test_xla_gives_the_same_bits():
    pytest.importorskip("jax", reason="jax is not installed")
    node, own = tanh_loop(40, 37)
    assert_same_bits(node, own, ["numba", "cvm", "jax"])


@pytest.fixture(scope="module")
def call():
    """Return what runs a loop, values of its inputs, and its result."""
    node, own = tanh_loop()
    run = runner(program_of(node.op))
    return run, own, run(*own)[0]


class TestArrays:
    @pytest.mark.all_forms
    @pytest.mark.parametrize(
        "changed",
        [
            np.asfortranarray,
            lambda x: x[::-1].copy()[::-1],
            lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
            lambda x: x.astype(x.dtype.newbyteorder()),
            lambda x: np.frombuffer(b"_" + x.tobytes(), x.dtype, offset=1).reshape(x.shape),
            lambda x: x.view(np.memmap),
        ],
        ids=["columns", "backwards", "strided", "swapped", "not aligned", "subclass"],
    )
    def test_any_layout(self, call, changed):
        run, own, right = call
        kept = [changed(value) for value in own]
        (result,) = run(*kept)
        np.testing.assert_array_equal(result, right)
        assert type(result) is np.ndarray
        for value, same in zip(kept, own, strict=True):
            np.testing.assert_array_equal(value, same)

    def test_what_does_not_fit_is_refused(self, call):
        run, own, _ = call
        with pytest.raises(TypeError, match="expected an array of dtype float64, got float32"):
            run(own[0].astype("float32"), *own[1:])
        with pytest.raises(TypeError, match="expected an array of 2 dimensions, got one of 1"):
            run(own[0][0], *own[1:])
        with pytest.raises(ValueError, match="expected an ndarray"):
            run([[1.0]], *own[1:])
        with pytest.raises(ValueError, match="not None"):
            run(None, *own[1:])
        with pytest.raises(TypeError, match="number of inputs"):
            run(*own[1:])

    def test_numbers_are_arrays_without_axes(self):
        n, start = pt.lscalar(), pt.dvector()
        h = scan(lambda h: pt.sin(h) + 1, outputs_info=[start], n_steps=n)
        ((node, own),) = nodes_of([n, start], [h], [5, np.ones(3)])
        run = runner(program_of(node.op))
        for steps in (5, np.int64(5), np.asarray(5)):
            np.testing.assert_array_equal(run(steps, *own[1:])[0], run(*own)[0])

    def test_tables_longer_than_what_lies_on_the_stack(self):
        xs = [pt.tensor(dtype="float64", shape=(3, 2)) for _ in range(60)]
        h = scan(lambda *v: pt.tanh(sum(v)), xs, [pt.zeros(2)])
        values = [rng.normal(size=(3, 2)) for _ in xs]
        f = pytensor.function(xs, h, mode=MODES["c"])
        (op,) = [n.op for n in f.maker.fgraph.apply_nodes if isinstance(n.op, ElemwiseScan)]
        assert program_of(op).words.size > 240
        state = np.zeros(2)
        for row, found in zip(sum(values), f(*values), strict=True):
            state = np.tanh(row + state)
            np.testing.assert_allclose(found, state, rtol=1e-12)


class TestThunks:
    def test_results_are_reused_if_nobody_else_has_them(self):
        node, own = tanh_loop()
        key = registered(program_of(node.op))
        cell, done = [None], [False]
        thunk = Thunk(key, [[value] for value in own], [cell], [done])
        thunk()
        assert done == [True]
        place = cell[0].ctypes.data
        thunk()
        assert cell[0].ctypes.data == place
        kept = cell[0]
        copy = kept.copy()
        thunk.inputs[0][0] = 2 * own[0]
        thunk()
        assert not np.shares_memory(cell[0], kept)
        np.testing.assert_array_equal(kept, copy)
        view = cell[0][1:]
        thunk()
        assert not np.shares_memory(cell[0], view)
        thunk.inputs[0][0] = np.ones((9, 5))
        thunk()
        assert cell[0].shape == (10, 5)

    def test_errors_leave_everything_as_it_was(self):
        node, own = tanh_loop()
        cell = [None]
        cells = [[value] for value in own]
        thunk = Thunk(registered(program_of(node.op)), cells, [cell], [])
        thunk()
        before = cell[0]
        index = next(k for k, v in enumerate(own) if v.ndim == 1)
        cells[index][0] = np.ones(4)
        with pytest.raises(ValueError, match="shape"):
            thunk()
        assert cell[0] is before
        cells[index][0] = own[index]
        thunk()

    def test_other_threads_go_on_meanwhile(self):
        n = pt.lscalar()
        h = scan(lambda h: pt.sin(h) + 1.0, outputs_info=[0.0], n_steps=n)[-1]
        f = pytensor.function([n], h, mode=MODES["c"])
        ticks = []
        stop = threading.Event()

        def tick():
            while not stop.is_set():
                ticks.append(time.perf_counter())
                time.sleep(0.001)

        thread = threading.Thread(target=tick)
        thread.start()
        start = time.perf_counter()
        f(5_000_000)
        end = time.perf_counter()
        stop.set()
        thread.join()
        inside = [t for t in ticks if start + 0.002 < t < end - 0.002]
        assert len(inside) > 5

    def test_one_function_in_two_threads(self):
        node, own = tanh_loop(20_000, 40)
        program = program_of(node.op)
        run = runner(program)
        (right,) = run(*own)
        results = [None, None]

        def call(k):
            results[k] = [run(*own)[0] for _ in range(5)]

        threads = [threading.Thread(target=call, args=(k,)) for k in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for found in (*results[0], *results[1]):
            np.testing.assert_array_equal(found, right)


class TestXLA:
    def test_what_is_lowered_has_no_addresses(self):
        jax = pytest.importorskip("jax", reason="jax is not installed")
        node, own = tanh_loop()
        inputs = [variable.type() for variable in node.inputs]
        f = pytensor.function(inputs, node.op.make_node(*inputs).outputs, mode=Mode("jax", None))
        f(*own)
        text = jax.jit(f.vm.jit_fn).lower(*own).as_text()
        key = registered(program_of(node.op))
        assert key in text
        assert str(address(key)) not in text

    @pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timer")
    def test_a_long_loop_can_be_interrupted(self):
        pytest.importorskip("jax", reason="jax is not installed")
        h = scan(lambda h: pt.sin(h) + 1.0, outputs_info=[0.0], n_steps=2**30)[-1]
        f = pytensor.function([], h, mode="JAX")

        def interrupt(*arguments):
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        # Processes that test for others ignore it.
        on_interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 2)
            with pytest.raises(KeyboardInterrupt):
                np.asarray(f())
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            signal.signal(signal.SIGINT, on_interrupt)

    def test_loops_that_are_not_known_are_errors(self):
        jax = pytest.importorskip("jax", reason="jax is not installed")
        from scanlib.backends.jax.kernels import TARGET, program_handler

        program_handler()
        call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((2,), "float32"))
        with pytest.raises(Exception, match="no such loop"):
            np.asarray(call(np.ones(2, "float32"), program="x", first=np.int64(0)))


def test_programs_with_the_same_code_differ_by_their_arrays():
    keys = set()
    for dtype in ("int8", "uint8"):
        x, start = pt.vector(dtype=dtype), pt.scalar(dtype=dtype)
        h = scan(lambda x, h: h * x + x * x, x, [start])
        f = pytensor.function([x, start], h, mode=MODES["c"])
        result = f(np.full(3, 100, dtype), np.asarray(3, dtype))
        assert result.dtype == dtype
        nodes = f.maker.fgraph.apply_nodes
        (op,) = [node.op for node in nodes if isinstance(node.op, ElemwiseScan)]
        keys.add(registered(program_of(op)))
    assert len(keys) == 2


def test_the_library_is_compiled_once():
    assert library() is library()


def test_the_compiler_may_be_away_for_a_while(monkeypatch):
    """It is while PyTensor and PyMC fold constants: other threads and later calls are no slower."""
    loaded = []
    monkeypatch.setattr(thunks, "_loaded", loaded)
    monkeypatch.setattr(thunks, "_load", lambda compiler: f"by {compiler}")
    expected = f"by {config.cxx}"
    with config.change_flags(cxx=""):
        assert library() is None
    others = set(threading.enumerate())
    with config.change_flags(cxx=config.cxx):
        with thunks._lock:
            thunks.prepare_library()
            config.cxx = ""
        for thread in set(threading.enumerate()) - others:
            thread.join(10)
        assert loaded == [expected]
        assert library() == expected


@pytest.mark.parametrize("mode", ["numba", "c", "py"])
def test_operations_with_several_results_go_another_way(mode):
    """As those that iterate by themselves: PyTensor's linkers run such a loop."""
    x, y = float64("x"), float64("y")
    op = Elemwise(ScalarLoop(init=[x, y], update=[0.5 * x + y, 0.25 * y]))
    v = pt.dmatrix("v")
    h = scan(lambda v, h: sum(op(pt.constant(2), v, h)), v, [pt.zeros(3)])
    values, state = rng.uniform(0.3, 2.0, (5, 3)), np.zeros(3)
    for row, found in zip(values, pytensor.function([v], h, mode=MODES[mode])(values), strict=True):
        first, second = row, state
        for _ in range(2):
            first, second = 0.5 * first + second, 0.25 * second
        state = first + second
        np.testing.assert_allclose(found, state, rtol=1e-12)
