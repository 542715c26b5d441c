"""Loops that are solved by Newton's method, written as loops of affine loops."""
