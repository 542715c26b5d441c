"""Arrays inside the steps of a loop: what PyTensor's tensor Ops mean, as kernels.

Nearly all shapes of a step are known before the first one. They are expressions of the loop's
inputs (`sizes`); what has to agree is compared once, before the first step, and each result gets a
part of one workspace (`places`). Slices between places that a step computes have another size at
each step: they get memory for the largest, and their sizes are compared at the step. What is left
of an array in a kernel is a pointer and strides.
"""
