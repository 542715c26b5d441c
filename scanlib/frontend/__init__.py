"""The functions users call: they turn a step function and its arguments into a loop."""

from scanlib.frontend.scan import scan
from scanlib.frontend.step import until
from scanlib.frontend.views import filter, foldl, foldr, map, reduce

__all__ = ["filter", "foldl", "foldr", "map", "reduce", "scan", "until"]
