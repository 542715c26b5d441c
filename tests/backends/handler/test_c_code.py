"""Loops under the C linker: threads, errors, literals, versions, what runs without them."""

import pickle

import numpy as np
import pytensor
import pytensor.scalar as ps
import pytensor.tensor as pt
import pytest
from pytensor.tensor.elemwise import Elemwise

import scanlib
from scanlib.backends.handler.programs import program_of
from scanlib.kernels.compiled import program_key
from scanlib.kernels.printers.c import literal
from scanlib.ops.errors import InitialRowsError, SequenceLengthError, StepCountError
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from tests.c_loops import compiled, trace, uniform
from tests.checks import assert_same
from tests.modes import MODES
from tests.reference import reference_scan


class TestThreads:
    @pytest.fixture
    def two_threads(self):
        with pytensor.config.change_flags(scanlib__threads=2, scanlib__parallel_channels=1):
            yield

    def build(self):
        x, start, w = pt.dtensor3("x"), pt.dmatrix("start"), pt.dvector("w")
        y, sums = scanlib.scan(
            lambda x, y, w: [pt.tanh(x * y + w), pt.sum(x * y, axis=0)],
            sequences=x,
            outputs_info=[start, None],
            non_sequences=w,
            return_updates=False,
        )
        cost = pt.sum(y**2) + pt.sum(sums)
        return [x, start, w], [y, sums, *pytensor.grad(cost, [x, start, w])]

    @pytest.mark.slow
    def test_slices(self, two_threads):
        inputs, outputs = self.build()
        call = compiled(inputs, outputs)
        assert any(program_of(op) is not None for op in call.ops)
        with pytensor.config.change_flags(scanlib__threads=1):
            alone = compiled(inputs, outputs)
        for n, m in ((7, 5), (1, 3), (2, 64), (0, 4)):
            whole = uniform(9, n, m), uniform(n, m), uniform(m)
            for values in (whole, (whole[0][:, :, ::-1], whole[1], whole[2])):
                first, second, expected = call(*values), call(*values), alone(*values)
                assert_same(first, expected, rtol=1e-12, atol=1e-14)
                for one, other in zip(first, second, strict=True):
                    assert one.tobytes() == other.tobytes()

    @pytest.mark.slow
    def test_flags_without_exceptions(self, two_threads):
        """PyMC sets such flags for all of PyTensor's code, and scanlib's catches exceptions."""
        flags = "-fno-exceptions -fno-unwind-tables -fno-asynchronous-unwind-tables"
        a, b, start = pt.dtensor3("a"), pt.dmatrix("b"), pt.dvector("start")
        h = scanlib.linear_scan(a, b, start, matrix=True)
        inputs, outputs = self.build()
        with pytensor.config.change_flags(gcc__cxxflags=flags):
            call = compiled([*inputs, a, b, start], [outputs[0], h])
        values = uniform(4, 2, 3), uniform(2, 3), uniform(3)
        matrices = uniform(4, 2, 2), uniform(4, 2), uniform(2)
        state, expected = matrices[2], []
        for matrix, offset in zip(*matrices[:2], strict=True):
            expected.append(state := matrix @ state + offset)
        alone = compiled(inputs, outputs[:1])(*values)
        assert_same(call(*values, *matrices), [*alone, np.array(expected)], rtol=1e-12)

    def test_one_piece(self, two_threads):
        """Two axes that are one in memory are cut as one."""
        x, start = pt.dtensor3("x"), pt.dmatrix("start")
        call = compiled([x, start], trace(lambda x, y: x * y + 1, sequences=x, outputs_info=start))
        for n, m in ((1, 50), (50, 1), (3, 7)):
            values = uniform(8, n, m), uniform(n, m)
            expected = reference_scan(lambda x, y: [x * y + 1], values[:1], [values[1]])
            assert_same(call(*values), expected)


class TestErrors:
    def test_steps_and_rows(self):
        n, start = pt.lscalar("n"), pt.dvector("start")
        y = trace(
            lambda far, near: pt.sin(far + near),
            outputs_info={"initial": start, "taps": [-2, -1]},
            n_steps=n,
        )
        call = compiled([n, start], y)
        with pytest.raises(StepCountError, match="n_steps must not be negative, got -3"):
            call(-3, np.ones(2))
        with pytest.raises(InitialRowsError, match=r"needs 2 initial rows .* got 1"):
            call(3, np.ones(1))

    def test_length_of_sequences(self):
        x, n = pt.dvector("x"), pt.lscalar("n")
        y = trace(lambda x, y: pt.sin(y) + x, sequences=x, outputs_info=0.0, n_steps=n)
        call = compiled([x, n], y)
        with pytest.raises(SequenceLengthError, match=r"gives 2 rows.* n_steps=5 steps"):
            call(np.ones(2), 5)

    def test_sizes_of_channels(self):
        x, w, start = pt.dmatrix("x"), pt.dvector("w"), pt.dvector("start")
        y = trace(lambda x, y, w: x * y + w, sequences=x, outputs_info=start, non_sequences=w)
        call = compiled([x, w, start], y)
        with pytest.raises(ValueError, match="Incompatible Elemwise input shapes"):
            call(np.ones((3, 4)), np.ones(5), np.ones(4))


class TestCode:
    def test_literals_are_exact(self):
        assert literal(-(2**63), "int64") == "(int64_t)(-9223372036854775807LL - 1)"
        assert literal(2**64 - 1, "uint64") == "(uint64_t)18446744073709551615ULL"
        assert literal(0.1, "float64") == "0x1.999999999999ap-4"
        assert literal(-np.inf, "float32") == "(float)-INFINITY"

    def test_composites_are_expanded(self):
        u, v = ps.float64("u"), ps.float64("v")
        both = Elemwise(ps.Composite([u, v], [ps.tanh(u * v) + ps.constant(2.5), u * v]))
        x = pt.dvector("x")
        y, z = scanlib.scan(
            lambda x, y: list(both(x, y)),
            sequences=x,
            outputs_info=[0.5, None],
            return_updates=False,
        )
        call = compiled([x], [y, z])
        values = uniform(20)
        expected = reference_scan(lambda x, y: [np.tanh(x * y) + 2.5, x * y], [values], [0.5, None])
        assert_same(call(values), expected)

    def test_operations_without_c_code_run_through_perform(self):
        class Half(ps.UnaryScalarOp):
            def impl(self, x):
                return x / 2

        half = Elemwise(Half(ps.upgrade_to_float, name="half"))
        x = pt.dvector("x")
        y = trace(lambda x, y: half(y) + x, sequences=x, outputs_info=0.0)
        function = pytensor.function([x], y, mode=MODES["c"])
        (op,) = (n.op for n in function.maker.fgraph.toposort() if isinstance(n.op, ElemwiseScan))
        assert program_of(op) is None
        values = uniform(5)
        assert_same([function(values)], reference_scan(lambda x, y: [y / 2 + x], [values], [0.0]))

    def test_perform_where_it_is_asked_for(self):
        x = pt.dvector("x")
        y = trace(lambda x, y: pt.sin(y) + x, sequences=x, outputs_info=0.0)
        compiled([x], y)  # its module is known from here on
        with pytensor.config.change_flags(scanlib__perform="python"):
            function = pytensor.function([x], y, mode=MODES["c"])
            nodes = function.maker.fgraph.toposort()
            for node, thunk in zip(nodes, function.vm.thunks, strict=True):
                assert not (isinstance(node.op, ElemwiseScan) and hasattr(thunk, "cthunk"))
            assert function(np.ones(3)).shape == (3,)

    def test_versions(self):
        x = pt.dmatrix("x")
        y = trace(lambda x, y: pt.sin(y) + x, sequences=x, outputs_info=pt.zeros(x.shape[1]))
        (op,) = compiled([x], y).ops
        key = program_key(program_of(op))
        assert program_key(program_of(pickle.loads(pickle.dumps(op)))) == key
        with pytensor.config.change_flags(scanlib__threads=2):
            assert program_key(program_of(op)) != key

    def test_one_module_of_a_whole_function_is_refused(self):
        x = pt.dvector("x")
        y = trace(lambda x, y: 0.5 * y + x, sequences=x, outputs_info=0.0).owner.inputs[0]
        mode = pytensor.compile.mode.Mode(linker="c", optimizer="fast_run")
        with pytest.raises(NotImplementedError, match="use linker='cvm'"):
            pytensor.function([x], y, mode=mode)

    def test_results_are_the_callers(self):
        """A result of one call is not overwritten by the next."""
        x, start = pt.dmatrix("x"), pt.dvector("start")
        y = trace(lambda x, y: x * y + 1, sequences=x, outputs_info=start)
        function = pytensor.function([x, start], [y, y[-1] * 2], mode=MODES["c"])
        first = function(uniform(5, 3), uniform(3))
        kept = [value.copy() for value in first]
        second = function(uniform(5, 3, seed=7), uniform(3, seed=8))
        for value, copy, other in zip(first, kept, second, strict=True):
            np.testing.assert_array_equal(value, copy)
            assert not np.shares_memory(value, other)

    def test_numbers_for_other_code(self):
        """An index that kernels compute beside arrays is a number to PyTensor's C code."""
        x, start = pt.dvector("x"), pt.dscalar("start")
        rows = trace(lambda y: y + 1, outputs_info=pt.full_like(x, start), n_steps=x.shape[0])
        function = pytensor.function([x, start], rows[7 % x.shape[0]], mode=MODES["c"])
        for n in (2, 5):
            np.testing.assert_array_equal(function(np.zeros(n), 0.5), np.full(n, 1.5 + 7 % n))
