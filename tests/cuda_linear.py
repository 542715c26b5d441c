"""Matrix recurrences by their CUDA kernels on the emulated device, and how they are cut."""

from unittest import mock

import numpy as np

from scanlib.backends.cuda import linear
from scanlib.backends.cuda.linear import LinearLoop
from scanlib.backends.cuda.schedule import LinearSchedule
from tests.cuda_device import emulated_driver, run_call


def cut(chunks):
    """Return a `choose_linear` that takes so many chunks, or as many as there are steps."""

    def choose(steps, vectors, processors, group, columns):
        chunk = max(1, -(-steps // (chunks if columns else 1)))
        return LinearSchedule(chunk, max(1, -(-steps // chunk)))

    return choose


def sized(recurrence, inputs):
    """The kernels' loop for some arrays, the sizes of a call, and the arrays that it is given."""
    op, given = recurrence.applied(inputs)
    loop, arrays = LinearLoop(op), [np.asarray(value) for value in given[int(op.has_n_steps) :]]
    n_steps = int(given[0]) if op.has_n_steps else None
    return loop, loop.sizes([array.shape for array in arrays], n_steps), arrays


def kernels_of(recurrence, inputs):
    loop, sizes, _ = sized(recurrence, inputs)
    return loop.kernels(sizes)


def run(recurrence, inputs):
    """Run a matrix recurrence by its kernels; the result is poisoned before."""
    loop, sizes, arrays = sized(recurrence, inputs)
    call = loop.call(sizes, [array.strides for array in arrays], 2)
    (result,) = run_call(emulated_driver(), call, arrays)
    return result


def run_in_chunks(op, inputs):
    """Yield what a matrix recurrence gives, walked whole and cut in several ways."""
    for chunks in (1, 3, 7):
        with mock.patch.object(linear, "choose_linear", cut(chunks)):
            yield run(op, inputs)
