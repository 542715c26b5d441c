"""Arrays inside the steps of a loop: what PyTensor's tensor Ops mean, as kernels.

Nearly all shapes of a step are known before the first one. They are expressions of the loop's
inputs (`sizes`); what has to agree is compared once, before the first step, and each result gets a
part of one workspace (`places`). What is left of an array in a kernel is a pointer and strides.

| module | holds |
|---|---|
| `sizes` | integers that are known before the first step |
| `places` | arrays in memory, and who may use the workspace when |
| `nests` | loops over the items of arrays: elementwise Ops, copies, reductions |
| `views` | transposes, slices, indices, joins: other ways to look at memory, and writes to it |
| `gathers` | arrays as indices: items read from computed places, and written to such |
| `orders` | cumulative sums and products, the largest item's place |
| `blockwise` | Ops that are applied to each item of a batch |
| `algebra` | products, factorizations and solves, by `scanlib.kernels.linalg` |
| `step` | one step: how variables are held, and which rule writes which Op |
"""
