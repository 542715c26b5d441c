"""Loops that an Op does faster: elementwise ones, and those around a matrix recurrence."""
