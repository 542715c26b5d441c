"""Text of kernels: how statements are written; that of operations is in a table of the language.

A printer prints what it is given (`scanlib.kernels.language.OPERATIONS`). What is different for a
target, such as its vector registers, is decided before, by schedules; where the processor has no
instruction that multiplies and adds, LLVM's printer writes two.
"""
