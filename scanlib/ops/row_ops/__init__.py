"""Ops on the rows around loops."""
