"""An error in a rewrite of scanlib's ends no compilation: what it was for stays as it was."""

import json
import logging

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import optdb
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.tensor.elemwise import Elemwise

import scanlib
from scanlib.ops.loop_rewrite import LoopRewrite, WhereLoopsAre, record_of
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.scan import Scan
from scanlib.rewrites.adopt import adopt
from scanlib.rewrites.lower import lower_elementwise
from tests.modes import MODES

REWRITES = sorted(name for name in optdb._names if name.startswith("scanlib_"))
ROWS = np.array([0.5, -1.0, 2.0])


def smoothed(x, name, scan=scanlib.scan, factor=0.5):
    return scan(
        lambda x, y: factor * y + pt.tanh(x),
        sequences=x,
        outputs_info=pt.zeros(()),
        name=name,
        return_updates=False,
    )


def expected(rows, factor=0.5):
    values, y = [], 0.0
    for x in rows:
        y = factor * y + np.tanh(x)
        values.append(y)
    return values


def fail(*args, **kwargs):
    # PyTensor catches other errors by itself, but lets this one through.
    raise AssertionError("made to fail")


@pytest.fixture
def lenient():
    """PyTensor's default, which the other tests do not have."""
    with pytensor.config.change_flags(on_opt_error="warn"):
        yield


def test_each_rewrite(lenient, monkeypatch, caplog):
    """Each one is of the class that catches errors, and says in which rewrite it was."""
    assert len(REWRITES) > 20
    for name in REWRITES:
        rewrite = optdb[name]
        assert isinstance(rewrite, LoopRewrite)
        monkeypatch.setattr(rewrite, "rewrite_loops", fail)
        fgraph = FunctionGraph([], [smoothed(pt.constant(ROWS), "walk")], clone=False)
        rewrite.rewrite(fgraph)
        (failure,) = record_of(fgraph).failures
        assert (failure.rewrite, failure.loop) == (name, None)
        assert f"{name} left the graph as it was" in caplog.text
        assert "AssertionError: made to fail" in caplog.text
        with (
            pytensor.config.change_flags(on_opt_error="raise"),
            pytest.raises(AssertionError, match="made to fail"),
        ):
            rewrite.rewrite(fgraph)


@pytest.mark.parametrize("mode", ["c", "py"])
def test_a_function_without_any_of_them(mode, lenient, monkeypatch):
    for name in REWRITES:
        monkeypatch.setattr(optdb[name], "rewrite_loops", fail)
    x = pt.dvector("x")
    f = pytensor.function([x], smoothed(x, "walk"), mode=MODES[mode])
    np.testing.assert_allclose(f(ROWS), expected(ROWS))


def test_one_loop_of_two(lenient, monkeypatch, caplog):
    """The other loop is lowered all the same, and `explain` tells the two apart."""
    lowered = lower_elementwise.lower_elementwise

    def fail_for_one(loop, **options):
        return fail() if loop.name == "bad" else lowered(loop, **options)

    monkeypatch.setattr(lower_elementwise, "lower_elementwise", fail_for_one)
    x, z = pt.dvector("x"), pt.dvector("z")
    outputs = [smoothed(x, "bad"), smoothed(z, "good", factor=0.25)]
    f = pytensor.function([x, z], outputs, mode=MODES["c"])
    ops = [node.op for node in f.maker.fgraph.apply_nodes]
    assert {op.name for op in ops if isinstance(op, Scan)} == {"bad"}
    assert any(isinstance(op, ElemwiseScan) for op in ops)
    bad, good = f(ROWS, ROWS[:2])
    np.testing.assert_allclose(bad, expected(ROWS))
    np.testing.assert_allclose(good, expected(ROWS[:2], 0.25))
    explanation = scanlib.explain(f)
    assert any(
        text.startswith("scanlib_elementwise left bad as it was") for text in explanation.failures
    )
    assert not any("good" in text for text in explanation.failures)
    assert "left bad as it was" in " ".join(str(explanation).split())
    assert "left bad as it was" in explanation._repr_html_()
    assert json.dumps(explanation.to_dict()["failures"])
    assert caplog.text.count(explanation.failures[0]) >= 1


def test_rewrites_of_nodes(lenient):
    @node_rewriter([Elemwise])
    def break_down(fgraph, node):
        fail()

    x = pt.dvector("x")
    rewrite = WhereLoopsAre(break_down)
    without = FunctionGraph([x], [pt.exp(x)], clone=False)
    rewrite.rewrite(without)
    assert not record_of(without).failures
    fgraph = FunctionGraph([x], [pt.exp(smoothed(x, "walk"))], clone=False)
    rewrite.rewrite(fgraph)
    (failure,) = record_of(fgraph).failures
    assert (failure.rewrite, failure.loop) == ("WhereLoopsAre", None)
    assert failure.error.endswith("made to fail")
    with pytensor.config.change_flags(on_opt_error="raise"), pytest.raises(AssertionError):
        rewrite.rewrite(fgraph)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_adoption(lenient, monkeypatch):
    """A loop whose adoption fails stays PyTensor's; the others are adopted."""
    adopted = adopt.Adoption

    def fail_for_one(fgraph, node, *args):
        return fail() if node.op.name == "bad" else adopted(fgraph, node, *args)

    monkeypatch.setattr(adopt, "Adoption", fail_for_one)
    x = pt.dvector("x")
    outputs = [smoothed(x, name, pytensor.scan) for name in ("bad", "good")]
    with scanlib.enabled():
        f = pytensor.function([x], outputs, mode=MODES["c"])
    reasons = {loop.name: loop.reason for loop in scanlib.explain(f).adoption}
    assert reasons["good"] is None
    assert "an error in scanlib" in reasons["bad"]
    assert "made to fail" in reasons["bad"]
    for found in f(ROWS):
        np.testing.assert_allclose(found, expected(ROWS))


def test_silence(monkeypatch, caplog):
    monkeypatch.setattr(optdb["scanlib_linear"], "rewrite_loops", fail)
    with pytensor.config.change_flags(on_opt_error="ignore"), caplog.at_level(logging.DEBUG):
        explanation = scanlib.explain(smoothed(pt.dvector("x"), "walk"), MODES["c"])
    assert "made to fail" in explanation.failures[0]
    assert "made to fail" not in caplog.text
