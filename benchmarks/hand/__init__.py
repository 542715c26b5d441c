"""The loops of :mod:`benchmarks.loops` written by hand, values and gradients.

They check the values of everybody else and give the scale: what the loop costs with nothing around
it. Each is one plain numba loop on one thread, and its gradient one loop forwards and one
backwards. They take the loop's inputs in order, then the arrays to write into, which were
allocated before; ``name_gradient`` belongs to ``name``. A function that returns nothing leaves its
results in those arrays, in the order in which the loop's graph returns them; others return them.
"""
