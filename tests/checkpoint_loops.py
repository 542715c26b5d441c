"""Loops with checkpoints, for the tests of values and of graphs."""

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.mode import Mode

import scanlib

PLAIN = Mode(linker="py", optimizer="fast_run")


def close(actual, expected, rtol=1e-11, atol=1e-13):
    assert len(actual) == len(expected)
    for mine, wanted in zip(actual, expected, strict=True):
        assert mine.shape == wanted.shape
        np.testing.assert_allclose(mine, wanted, rtol=rtol, atol=atol)


def plain_step(xp):
    """A step that reads a tap of each kind, of NumPy or of PyTensor."""

    def step(x_before, x, h1, h2, w):
        h = xp.tanh(w * h2 + 0.5 * h1 - x_before * x)
        return [h, h * h1 + x]

    return step


def taps_loop(checkpoint, x, h, w, **options):
    return scanlib.scan(
        plain_step(pt),
        sequences={"input": x, "taps": [-1, 0]},
        outputs_info=[{"initial": h, "taps": [-1, -2]}, None],
        non_sequences=w,
        return_updates=False,
        checkpoint=checkpoint,
        **options,
    )


def tanh_loop(checkpoint, h, w, n=60):
    return scanlib.scan(
        lambda h, w: pt.tanh(w * h),
        outputs_info=h,
        non_sequences=w,
        n_steps=n,
        return_updates=False,
        checkpoint=checkpoint,
    )
