"""Sizes of a step's arrays, as expressions."""

from scanlib.kernels.arrays.sizes import Check, Given, Sizes, combined, product, total


def deep(first):
    """Return an expression whose text would have 3^190 words."""
    size = first
    for _ in range(190):
        size = combined("max", total(size, 1), product(size, size))
    return size


def test_expressions_that_share_their_parts():
    n, m = Given("dim", "n"), Given("dim", "m")
    large, other = deep(n), deep(m)
    assert total(large, other, 2) == total(2, other, large)
    assert hash(total(large, other)) == hash(total(other, large))
    sizes = Sizes()
    assert sizes.require(Check("ne", (large, m), "ValueError", "")) == m
    assert sizes.same(product(large, 3)) == product(m, 3)
    assert sizes.require(Check("ne", (other, m), "ValueError", "")) == m
    assert len(sizes.checks) == 2
