"""Small dense linear algebra in the kernel language.

A matrix is given as a `matrices.Matrix`: a pointer, a dtype, sizes, and strides in bytes, each an
integer or a value of a kernel. What is written into a kernel is the call of a function that all
calls of a kernel share, so that a product more is a line more; only of products of a few known rows
and columns there is one for each size.

`products.multiply` has ``C = A B``, for vectors too. `factorizations` has Cholesky's and triangular
factors, solves and inverses, which fill matrices whose rows lie one behind the other. Where BLAS is
to be used for large products, a kernel needs the addresses of its routines: `library` is a function
from a `Routine` of SciPy's to the value that has its address, a word of the table of a
`LoopProgram` that lists the routine among its `functions`.
"""
