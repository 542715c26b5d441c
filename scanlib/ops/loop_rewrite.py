"""What all of scanlib's rewrites of whole graphs have in common: none ends a user's compilation.

A rewrite makes a graph faster, not right. What it cannot handle it leaves as it is, and so it does
where it fails: the error is caught here, for all rewrites, and kept with the graph for
`scanlib.explain`. Each replacement in a graph is valid by itself, so what was done before an error
stays. With PyTensor's flag ``on_opt_error=raise``, as in the tests, an error is an error.
"""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pytensor.configdefaults import config
from pytensor.graph.basic import Apply
from pytensor.graph.features import Feature, ReplaceValidate
from pytensor.graph.fg import AbstractFunctionGraph, FunctionGraph
from pytensor.graph.rewriting.basic import GraphRewriter, NodeRewriter, dfs_rewriter
from pytensor.graph.utils import InconsistencyError

from scanlib._compat import features
from scanlib.ops.scan import Scan

_logger = logging.getLogger("scanlib.rewrites")


class RewriteFailure(NamedTuple):
    """An error in a rewrite: its name, the loop that it left as it was if known, and the error."""

    rewrite: str
    loop: str | None
    error: str

    def __str__(self) -> str:
        left = "the graph" if self.loop is None else self.loop
        return (
            f"{self.rewrite} left {left} as it was, because of an error in scanlib, which is worth "
            f"a report: {self.error}"
        )


@dataclass(frozen=True)
class AdoptedLoop:
    """What became of a loop of `pytensor.scan`: `reason` is why it stayed, None if it did not."""

    name: str
    reason: str | None = None


@dataclass(eq=False)
class Record(Feature):
    """What rewrites did to the loops of a graph, kept with it for `scanlib.explain`.

    The loops of `pytensor.scan`, where adoption looked at them; the names of loops that were taken
    apart, with what is said of them; of those that were written out in the steps of others, these,
    their own names and numbers of steps; errors; and the names of the rewrites that went through
    the loops to lower them.
    """

    adopted: list[AdoptedLoop] = field(default_factory=list)
    splits: list[tuple[str, str]] = field(default_factory=list)
    unrolled: list[tuple[str, str, int]] = field(default_factory=list)
    failures: list[RewriteFailure] = field(default_factory=list)
    lowered_by: set[str | None] = field(default_factory=set)


def record_of(fgraph: FunctionGraph) -> Record:
    """Return the record of a graph, a new one where it has none."""
    found = next(iter(features(fgraph, Record)), None)
    if found is None:
        found = Record()
        fgraph.attach_feature(found)
    return found


def holds(graph: AbstractFunctionGraph, is_wanted: Callable[[Apply], bool]) -> bool:
    """Whether a graph, or the step of a loop in it, has a node of some kind."""
    return any(
        is_wanted(node) or (isinstance(node.op, Scan) and holds(node.op.body, is_wanted))
        for node in graph.apply_nodes
    )


# Objects, and collections of each generation, after which Python looks for what nothing reaches.
_RARE = (100_000, 20, 20)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python look less often for objects that nothing reaches: of graphs, which hold hundreds
    of thousands that it goes through each time, this takes a quarter of the time of rewriting."""
    before = gc.get_threshold()
    if before[0]:  # else the user has it look for none
        gc.set_threshold(*map(max, before, _RARE))
    try:
        yield
    finally:
        gc.set_threshold(*before)


def note_failure(fgraph: FunctionGraph, failure: RewriteFailure) -> None:
    """Keep an error with the graph in whose rewrites it occurred."""
    failures = record_of(fgraph).failures
    if failure not in failures:
        failures.append(failure)


class LoopRewrite(GraphRewriter):
    """A rewrite of a whole graph; subclasses write `rewrite_loops`."""

    name: str | None = None

    def add_requirements(self, fgraph: FunctionGraph) -> None:
        fgraph.attach_feature(ReplaceValidate())

    def apply(self, fgraph: FunctionGraph) -> None:
        with self.attempt(fgraph), rare_collections():
            self.rewrite_loops(fgraph)

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        """Change the graph; what this raises is caught."""
        raise NotImplementedError

    @contextmanager
    def attempt(
        self,
        fgraph: FunctionGraph,
        node: Apply | None = None,
        note: Callable[[FunctionGraph, RewriteFailure], None] = note_failure,
    ) -> Iterator[None]:
        """Go on behind the block if something in it fails: `note` keeps the failure, and `node`,
        the loop, is left as it is while others are rewritten."""
        try:
            yield
        except Exception as error:
            self.failed(error, fgraph, node, note)

    def failed(
        self,
        error: Exception,
        fgraph: FunctionGraph,
        node: Apply | None = None,
        note: Callable[[FunctionGraph, RewriteFailure], None] = note_failure,
    ) -> None:
        """Keep an error with the graph, and log it, unless PyTensor's flag wants it raised."""
        if config.on_opt_error in ("raise", "pdb"):
            raise error
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        op = getattr(node, "op", None)
        named = getattr(op, "name", None) or getattr(getattr(op, "scan", None), "name", None)
        loop = None if node is None else named or "loop"
        failure = RewriteFailure(self.name or type(self).__name__, loop, said)
        note(fgraph, failure)
        if config.on_opt_error != "ignore":
            _logger.warning("%s (PyTensor's flag on_opt_error=raise shows where)", failure)


class LowersLoops(LoopRewrite):
    """Rewrites that replace loops one by one; subclasses write `lower`."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        loops = [node for node in fgraph.toposort() if isinstance(node.op, Scan)]
        if loops:
            record_of(fgraph).lowered_by.add(self.name)
        for node in loops:
            with self.attempt(fgraph, node):
                self.lower(fgraph, node)

    @staticmethod
    def lower(fgraph: FunctionGraph, node: Apply) -> bool:
        """Replace one loop; return whether it could be."""
        raise NotImplementedError


class WhereLoopsAre(LoopRewrite):
    """Rewrites of single nodes, in graphs with canonical loops or `always`."""

    def __init__(self, *rewriters: NodeRewriter, always: bool = False) -> None:
        self.rewriters = rewriters
        self.always = always

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        if not self.always and not any(isinstance(n.op, Scan) for n in fgraph.apply_nodes):
            return

        def failed(error: Exception, *place: Any) -> None:
            if not isinstance(error, InconsistencyError):  # a replacement that is not allowed here
                self.failed(error, fgraph)

        dfs_rewriter(*self.rewriters, failure_callback=failed).rewrite(fgraph)
