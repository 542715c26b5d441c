"""Matrix recurrences with products from both sides, and with items left out."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from scanlib.ops.lowered.linear_scan import LinearScan
from tests.modes import MODES


def both_sides(A, R, b, h, reverse):
    """The history of ``h' = A h R + b``, with matrices for all steps or for each."""
    rows = [h[0]]
    for t in range(len(b))[:: -1 if reverse else 1]:
        left, right = (m[t] if m.ndim == 3 else m for m in (A, R))
        rows.append(left @ rows[-1] @ right + b[t])
    return np.stack(rows[::-1] if reverse else rows)


@pytest.mark.slow
@pytest.mark.parametrize("linker", ["numba", "c", "py"])
@pytest.mark.parametrize(
    "coefficient, reverse, untraced, dtype",
    [
        ("fixed", False, False, "float64"),
        ("steps", True, False, "float32"),
        ("fixed", False, True, "float64"),
        ("steps", False, False, "complex128"),
    ],
)
def test_kernels_of_both_sides(linker, coefficient, reverse, untraced, dtype):
    op = LinearScan.of("real", coefficient, "both", False, reverse, untraced=untraced)
    inputs = [
        pt.tensor(dtype=dtype, shape=(None,) * n)
        for n in ((3, 3) if coefficient == "steps" else (2, 2)) + (3, 3)
    ]
    perform = "python" if linker == "py" else "auto"
    with pytensor.config.change_flags(scanlib__perform=perform):
        function = pytensor.function(inputs, op(*inputs), mode=MODES[linker])
        rng = np.random.default_rng(0)
        sizes = ((0, 2, 2), (1, 1, 1), (9, 2, 2), (9, 3, 3), (5, 4, 4), (6, 3, 5), (4, 9, 7))
        for steps, d, m in sizes:
            time = (steps,) if coefficient == "steps" else ()
            values = [
                (0.4 * rng.normal(size=shape)).astype(dtype)
                for shape in ((*time, d, d), (*time, m, m), (steps, d, m), (1, d, m))
            ]
            expected = both_sides(*values, reverse)
            actual = function(*values)
            tolerance = 1e-4 if dtype == "float32" else 1e-11
            assert actual.dtype == dtype
            np.testing.assert_allclose(
                actual, expected[-1:] if untraced else expected, rtol=tolerance, atol=tolerance
            )
        with pytest.raises(ValueError, match="sizes of matrix"):
            function(*values[:1], values[1][..., :-1], *values[2:])


def test_errors_of_sides_and_masks():
    with pytest.raises(ValueError, match="side 'both' is for real products"):
        LinearScan.of("max", "fixed", "both", False)
    with pytest.raises(ValueError, match="a mask is for real products"):
        LinearScan.of("log", has_mask=True)
    with pytest.raises(TypeError, match="the mask must be a boolean matrix"):
        LinearScan.of("real", "fixed", has_mask=True)(*[pt.dmatrix() for _ in range(4)])
    with pytest.raises(TypeError, match="there is no batch"):
        LinearScan.of("real", "fixed", "both", False)(
            pt.dmatrix(), pt.dmatrix(), pt.dtensor4(), pt.dtensor4()
        )


@pytest.mark.parametrize("linker", ["numba", "c", "py"])
@pytest.mark.parametrize(
    "side, vector, untraced",
    [("left", True, False), ("right", True, True), ("right", False, False)],
)
@pytest.mark.parametrize("coefficient", ["fixed", "steps"])
def test_kernels_leave_masked_items_out(linker, side, vector, untraced, coefficient):
    op = LinearScan.of("real", coefficient, side, vector, True, untraced=untraced, has_mask=True)
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
