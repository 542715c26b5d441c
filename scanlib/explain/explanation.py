"""`Explanation`: what `scanlib.explain` returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from scanlib.explain.data import AdoptedLoop, LoopExplanation
from scanlib.explain.html import html
from scanlib.explain.text import details, summary


@dataclass(frozen=True)
class Explanation:
    """What `scanlib.explain` returns: answers when printed, HTML in a notebook, data in `loops`.

    Attributes
    ----------
    loops : list of LoopExplanation
        In the order of computation.
    source : str
        What was explained: "compiled function", or "graph".
    linker : str
        The linker that runs it, or would.
    adoption : tuple of AdoptedLoop
        The loops of `pytensor.scan` that were there, where adoption is switched on, and what
        became of each; see `scanlib.enable`.
    splits : list of (str, str)
        The name of every loop that was taken apart, and what left it.
    failures : list of str
        Errors in scanlib's rewrites, and what was left as it was for them.
    devices : tuple of str
        For a function of `scanlib.shard`, how each loop was cut over devices at the last call:
        pieces, rounds of exchange, bytes.
    """

    loops: list[LoopExplanation] = field(default_factory=list)
    source: str = "graph"
    linker: str = ""
    adoption: tuple[AdoptedLoop, ...] = ()
    splits: list[tuple[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    devices: tuple[str, ...] = ()

    def __str__(self) -> str:
        return summary(self)

    def details(self) -> str:
        """Return text with all that is known: data, memory, schedules and obstacles."""
        return details(self)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html(self)

    def to_dict(self) -> dict[str, Any]:
        """Return dictionaries, sequences, strings and numbers, fit for `json.dumps`."""
        return {**asdict(self), "loops": [loop.to_dict() for loop in self.loops]}
