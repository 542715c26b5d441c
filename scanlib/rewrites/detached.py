"""Loops cut off from their graph, while what replaces them is built and rewritten."""

from __future__ import annotations

from dataclasses import dataclass

from pytensor.graph.basic import Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.db import RewriteDatabaseQuery

from scanlib.lengths.arrays import Lengths
from scanlib.lengths.forms import LengthForm
from scanlib.ops.graph import substitute
from scanlib.ops.loop import Loop
from scanlib.rewrites.pytensor_rewrites import run_query

_STABLE = RewriteDatabaseQuery(include=["canonicalize", "stabilize", "merge"])


@dataclass
class Detached:
    """A loop's inputs, which `detach` has replaced.

    Attributes
    ----------
    outer, stand_ins : list of Variable
        The inputs of the loop, each once, and what stands in their place.
    lengths : dict of Variable to LengthForm
        What is known of the lengths of sequences, by their stand-in.
    """

    outer: list[Variable]
    stand_ins: list[Variable]
    lengths: dict[Variable, LengthForm]

    def attach(self, values: list[Variable | None]) -> list[Variable | None]:
        """Return graphs of the stand-ins as graphs of the inputs.

        What is new has missed the rewrites of its phase: batches hold, for one, the naive forms of
        logarithms of sums.
        """
        chosen = [value for value in values if value is not None]
        graph = FunctionGraph(self.stand_ins, chosen, clone=False)
        run_query(_STABLE, graph)
        inputs = dict(zip(self.stand_ins, self.outer, strict=True))
        made = iter(substitute(graph.outputs, inputs))
        return [None if value is None else next(made) for value in values]


def detach(loop: Loop) -> Detached:
    """Replace the inputs of a loop."""
    outer = list(dict.fromkeys(loop.outer_inputs()))
    stand_ins = [variable.type() for variable in outer]
    places = dict(zip(outer, stand_ins, strict=True))
    known = Lengths(sure=True)
    lengths = {places[part.outer]: known.of(part.outer) for part in loop.sequences}
    loop.replace_outer(places)
    return Detached(outer, stand_ins, lengths)
