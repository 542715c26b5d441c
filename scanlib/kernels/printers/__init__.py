"""Text of kernels: a table from operations to LLVM and one to C, and little else.

A printer prints what it is given. What is different for a target, its vector registers or whether
it multiplies and adds in one instruction, is changed in the tree before (`scanlib.kernels.passes`).
"""
