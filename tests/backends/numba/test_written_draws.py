"""Steps that write what they draw into an array, which stays where it is."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.basic import Apply

import scanlib
from scanlib._compat import INDEX_WRITES
from scanlib.backends.handler.clusters import Plan
from scanlib.backends.numba.general_loop import prepare_body
from scanlib.ops.scan import Scan
from tests.checks import assert_same, in_python

DRAWN = {
    "item": lambda k, h, e: [h[k].set(0.9 * h[k - 1] + e[0]), None],
    "row": lambda k, h, e: [h[k].set(0.9 * h[k - 1] + e), None],
    "rows_read": lambda k, h, e: [h[k].set(e * h[k - 1]), h[k]],
    "added_twice": lambda k, h, e: [h[k].inc(e)[k - 1].inc(h[k] * e), h[k] + e],
    "read_later": lambda k, h, e: [new := h[k].set(e), new[k] * h[k]],
    "chosen": lambda k, h, e: [pt.switch(e[0] > 0, h[k].set(e), h), None],
}


@pytest.mark.parametrize("name", DRAWN)
def test_arrays_into_which_steps_write_draws(name, mode):
    """They are written in place; what a caller gives stays as it is."""
    ks, h0 = pt.lvector("ks"), pt.dmatrix("h0") if name != "item" else pt.dvector("h0")
    rng = pt.random.type.random_generator_type("rng")

    def step(k, h, rng):
        rng, e = pt.random.normal(size=2, rng=rng, return_next_rng=True)
        table, read = DRAWN[name](k, h, e)
        return [table, table.sum() if read is None else read, rng]

    table, read, _ = scanlib.scan(step, ks, [h0, None, rng], return_updates=False)
    inputs, outputs = [ks, h0, rng], [table[-1], read]
    start = np.arange(8.0).reshape(4, 2) if name != "item" else np.arange(4.0)
    for places in ([1, 2, 3, 1], [2]):
        values = [np.array(places), start.copy(), np.random.default_rng(3)]
        wanted = in_python(inputs, outputs)(*values)
        f = pytensor.function(inputs, outputs, mode=mode)
        assert_same(f(*values[:2], np.random.default_rng(3)), wanted)
        np.testing.assert_array_equal(values[1], start)


def test_draws_into_an_array_copy_nothing(fast_mode):
    ks, h0 = pt.lvector("ks"), pt.dvector("h0")
    rng = pt.random.type.random_generator_type("rng")

    def step(k, h, rng):
        rng, e = pt.random.normal(rng=rng, return_next_rng=True)
        return [h[k].set(h[k - 1] + e), rng]

    table, _ = scanlib.scan(step, ks, [h0, rng], return_updates=False)
    f = pytensor.function([ks, h0, rng], table[-1], mode=fast_mode)
    (loop,) = (node for node in f.maker.fgraph.toposort() if isinstance(node.op, Scan))
    body = prepare_body(loop.op)
    assert body.destroyed == {0, 1}
    writes = [node for node in body.fgraph.toposort() if isinstance(node.op, INDEX_WRITES)]
    alone = [part for part in Plan(body.fgraph).order() if isinstance(part, Apply)]
    assert writes
    assert all(write in alone for write in writes)
