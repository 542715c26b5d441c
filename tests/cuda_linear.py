"""Matrix recurrences by their CUDA kernels on the emulated device, and how they are cut."""

from unittest import mock

import numpy as np

from scanlib.backends.cuda import linear
from scanlib.backends.cuda.linear import linear_kernels
from scanlib.backends.cuda.schedule import LinearSchedule
from tests.cuda_device import emulated_driver, run_call


def cut(chunks):
    """Return a `choose_linear` that takes so many chunks, or as many as there are steps."""

    def choose(steps, vectors, processors, group, columns):
        chunk = max(1, -(-steps // (chunks if columns else 1)))
        return LinearSchedule(chunk, max(1, -(-steps // chunk)))

    return choose


def kernels_of(op, inputs):
    return linear_kernels(op, inputs, dtype_of(op, inputs))[0]


def dtype_of(op, inputs):
    return np.asarray(op.parts(inputs).initial).dtype.name


def run(op, inputs):
    """Run a matrix recurrence by its kernels; the result is poisoned before."""
    kernels, sizes = linear_kernels(op, inputs, dtype_of(op, inputs))
    arrays = [np.asarray(value) for value in inputs[int(op.has_n_steps) :]]
    call = kernels.call(sizes, [array.strides for array in arrays], 2)
    (result,) = run_call(emulated_driver(), call, arrays)
    return result


def run_in_chunks(op, inputs):
    """Yield what a matrix recurrence gives, walked whole and cut in several ways."""
    for chunks in (1, 3, 7):
        with mock.patch.object(linear, "choose_linear", cut(chunks)):
            yield run(op, inputs)
