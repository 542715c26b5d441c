"""The smallest possible loop: what does not need the steps one after the other leaves it."""
