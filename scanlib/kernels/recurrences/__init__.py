"""Recurrence classes as kernels: what composes the steps of one block of one channel.

Every function writes the scan of the steps of a `Block`: it reads their elements, writes the new
values, and returns the truth value whether these can be trusted. They cannot where composing steps
could lose what one step after the other keeps, or keep what it loses: where a value came near to
overflow or is not finite, or where products of coefficients may overflow or underflow (`trust`).
The caller then takes the steps of the block one after the other.
"""
