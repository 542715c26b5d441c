"""Matrix recurrences with items left out."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from tests.linear import Recurrence
from tests.modes import MODES


@pytest.mark.parametrize("linker", ["numba", "c", "py"])
@pytest.mark.parametrize(
    "side, vector, untraced",
    [("left", True, False), ("right", True, True), ("right", False, False)],
)
@pytest.mark.parametrize("coefficient", ["fixed", "steps"])
def test_kernels_leave_masked_items_out(linker, side, vector, untraced, coefficient):
    op = Recurrence("real", coefficient, side, vector, True, untraced=untraced, has_mask=True)
    state = 2 if vector else 3
    ranks = [3 if coefficient == "steps" else 2, state, state]
    inputs = [pt.tensor(dtype="float64", shape=(None,) * rank) for rank in ranks]
    inputs.append(pt.tensor(dtype="bool", shape=(None, None)))
    perform = "python" if linker == "py" else "auto"
    with pytensor.config.change_flags(scanlib__perform=perform):
        function = pytensor.function(inputs, op(*inputs), mode=MODES[linker])
        rng = np.random.default_rng(0)
        for steps, d in ((0, 2), (3, 1), (70, 2), (70, 3), (5, 9)):
            time = (steps,) if coefficient == "steps" else ()
            row = (d,) if vector else (2, d)
            mask = rng.random((d, d)) < 0.6
            matrix = np.where(mask, 0.5 * rng.normal(size=(*time, d, d)), 0)
            offset, initial = rng.normal(size=(steps, *row)), rng.normal(size=(1, *row))
            if steps:
                offset[steps // 2].flat[0] = np.nan
            rows = [initial[0]]
            for t in range(steps)[::-1]:
                now = matrix[t] if time else matrix
                now, kept = (now, mask) if side == "left" else (now.T, mask.T)
                terms = np.where(kept, now * rows[-1][..., None, :], 0)
                rows.append(terms.sum(axis=-1) + offset[t])
            expected = np.stack(rows[::-1])
            expected = expected[:1] if untraced else expected
            np.testing.assert_allclose(
                function(matrix, offset, initial, mask), expected, rtol=1e-10, atol=1e-12
            )
