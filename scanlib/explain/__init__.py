"""`scanlib.explain`: what runs the loops of a function, how good that is, and what can be done.

`loop_reports` goes through a graph and answers for each loop, with `names` and `reasons`; `linkers`
for the linker. The answers are the dataclasses of `data`, `explanation` shows them. Nothing here
decides anything: schedules come from where backends take them
(`scanlib.schedules.selection.schedule`), recurrence classes and obstacles from the analysis that
lowers loops.
"""

from dataclasses import replace
from typing import Any

from pytensor.compile.aliasing import add_supervisor_to_fgraph
from pytensor.compile.io import In
from pytensor.compile.mode import Mode, get_mode
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph

from scanlib._compat import function_inside
from scanlib.explain.data import LoopExplanation, Obstacle, Part
from scanlib.explain.explanation import Explanation
from scanlib.explain.linkers import Setting, linker_name
from scanlib.explain.loop_reports import explain_nodes
from scanlib.frontend.trees import variables_of
from scanlib.ops.loop_rewrite import AdoptedLoop, record_of

__all__ = ["AdoptedLoop", "Explanation", "LoopExplanation", "Obstacle", "Part", "explain"]


def explain(f: Any, mode: str | Mode | None = None) -> Explanation:
    """Tell how the loops of a function are computed, and why.

    Parameters
    ----------
    f : compiled function, or tree of variable
        What `pytensor.function`, `scanlib.shard`, or `compile_dlogp` of a PyMC model returned, or
        the outputs of a graph, such as what `scanlib.loop` returned. A graph is copied and
        rewritten as `pytensor.function` would do with these outputs; nothing is compiled, and the
        graph itself stays as it is.
    mode : str or Mode, optional
        For a graph, the mode whose rewrites are run; PyTensor's default mode if not given.

    Returns
    -------
    Explanation
        Printed, it answers three questions: what runs, how good that is and why, and what you
        can do. `details()` is a longer text, which a notebook folds away. Its `loops` hold the
        same as data, one entry per loop in the order of computation, with nested loops in
        `inner`; `to_dict()` returns all of it in a form that `json.dumps` takes. Loops of a
        function compiled with ``profile=True`` have the time they take in a call.

    Raises
    ------
    TypeError
        If `f` is none of the above, or `mode` is given with a compiled function.

    Notes
    -----
    Recurrence classes are those of G. Blelloch, "Prefix sums and their applications", 1990, and
    their kin: sets of functions of the state that are closed under composition.

    Examples
    --------
    >>> import pytensor.tensor as pt, scanlib
    >>> x, phi = pt.dvector("x"), pt.dscalar("phi")
    >>> y = scanlib.scan(
    ...     lambda x, y, phi: phi * y + x,
    ...     sequences=x,
    ...     outputs_info=0.0,
    ...     non_sequences=phi,
    ...     name="ar1",
    ...     return_updates=False,
    ... )
    >>> (loop,) = scanlib.explain(y).loops
    >>> print(loop.op, "|", loop.schedule, "|", loop.part("state 0").recurrence)
    ElemwiseScan | blocks of steps | affine
    """
    if hasattr(f, "describe") and hasattr(f, "function"):  # of `shard`, whose module needs JAX
        return replace(explain(f.function, mode), devices=tuple(f.describe().splitlines()))
    f = function_inside(f)
    fgraph = getattr(getattr(f, "maker", None), "fgraph", None)
    if isinstance(fgraph, FunctionGraph):
        if mode is not None:
            raise TypeError(
                "explain: mode is for graphs, but f is a compiled function, which has its mode; "
                "leave mode out, or pass the function's outputs as variables"
            )
        return _explanation(fgraph, f.maker.linker, f)
    advice = "; compile it with pytensor.function, or pass its symbolic result" * callable(f)
    if hasattr(f, "compile_dlogp"):
        advice = "; pass what its compile_logp() or compile_dlogp() returns"
    outputs = variables_of(f, "explain: f must be a compiled pytensor.function", advice)
    resolved = get_mode(mode)
    return _explanation(_rewritten(outputs, resolved), resolved.linker)


def _explanation(fgraph: FunctionGraph, linker: Any, f: Any = None) -> Explanation:
    """Return the explanation of a graph, which is that of the compiled function `f`, if given."""
    record = record_of(fgraph)
    reasons = {loop.name: loop.reason for loop in record.adopted if loop.reason is not None}
    lowered_by = frozenset(record.lowered_by)
    setting = Setting(linker_name(linker), lowered_by, reasons=reasons).of(fgraph)
    loops = []
    for node, loop in explain_nodes(fgraph.toposort(), setting):
        seconds, whole = _times(f, node) or (None, None)
        share = seconds / whole if seconds is not None and whole else None
        loops.append(replace(loop, seconds=seconds, share=share))
    return Explanation(
        loops,
        "graph" if f is None else "compiled function",
        setting.linker,
        tuple(record.adopted),
        record.splits,
        [str(failure) for failure in record.failures],
        unrolled=record.unrolled,
    )


def _times(f: Any, node: Apply) -> tuple[float, float] | None:
    """Return the seconds a loop took in a call and those of the whole call, means over all calls.

    PyTensor's profile has the times of nodes, where a linker runs them one by one; in numba mode,
    `scanlib.backends.numba.linker` puts them there. None if they are not known.
    """
    profile = getattr(f, "profile", None)
    if not profile or not profile.fct_callcount:
        return None
    times = [own for (_, timed), own in profile.apply_time.items() if timed is node]
    calls = profile.fct_callcount
    return (sum(times) / calls, profile.vm_call_time / calls) if times else None


def _rewritten(outputs: list[Variable], mode: Mode) -> FunctionGraph:
    """Return a copy of a graph as the mode's rewrites leave it."""
    fgraph = FunctionGraph(outputs=outputs, clone=True)
    specs = [In(inp, mutable=False) for inp in fgraph.inputs]
    # As in a function: no rewrite may overwrite an input.
    add_supervisor_to_fgraph(fgraph=fgraph, input_specs=specs, accept_inplace=True)
    mode.optimizer.rewrite(fgraph)
    return fgraph
