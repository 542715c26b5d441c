"""Loops of `pytensor.scan` as canonical loops."""
