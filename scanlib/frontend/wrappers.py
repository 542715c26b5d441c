"""Loops of common shapes: `map`, `reduce`, `foldl`, `foldr`, `filter`, `scan_checkpoints`."""

from collections.abc import Callable
from typing import Any

from pytensor.graph.basic import Variable

from scanlib.frontend.arguments import list_sequences
from scanlib.frontend.builder import called_as, function_called
from scanlib.frontend.scan_function import scan
from scanlib.frontend.states import type_text
from scanlib.frontend.values import as_variable, read_flag, read_integer
from scanlib.ops.graph import is_tensor, row_type
from scanlib.ops.messages import loop_title


def map(
    fn: Callable[..., Any],
    sequences: Any,
    non_sequences: Any = None,
    truncate_gradient: int = -1,
    go_backwards: bool = False,
    mode: Any = None,
    name: str | None = None,
    return_updates: bool = True,
) -> Any:
    """Apply `fn` to every row of the sequences.

    Parameters
    ----------
    fn : callable
        Takes one row of each sequence (all its taps), then the non-sequences.
    sequences, non_sequences, truncate_gradient, go_backwards, mode, name, return_updates
        As in `scan`.

    Returns
    -------
    outputs : variable or list of variable
        The results, shape ``(steps, …)``.
    updates : dict
        As in `scan`; not returned with ``return_updates=False``.

    Examples
    --------
    >>> import pytensor, scanlib
    >>> import pytensor.tensor as pt
    >>> x = pt.vector("x")
    >>> squares = scanlib.map(lambda value: value**2, x, return_updates=False)
    >>> pytensor.function([x], squares)([1, 2, 3])
    array([1., 4., 9.])
    """
    options = {"go_backwards": go_backwards, "mode": mode, "name": name}
    options |= {"truncate_gradient": truncate_gradient, "return_updates": return_updates}
    with called_as("map"):
        return scan(fn, sequences, [], non_sequences, **options)


def reduce(
    fn: Callable[..., Any],
    sequences: Any,
    outputs_info: Any,
    non_sequences: Any = None,
    go_backwards: bool = False,
    mode: Any = None,
    name: str | None = None,
    return_updates: bool = True,
) -> Any:
    """Run a loop and return the last value of each output.

    Parameters
    ----------
    fn : callable
        Takes one row of each sequence, then the values of the step before, then the
        non-sequences.
    sequences, outputs_info, non_sequences, go_backwards, mode, name, return_updates
        As in `scan`.

    Returns
    -------
    outputs : variable or list of variable
        The values after the last step.
    updates : dict
        As in `scan`; not returned with ``return_updates=False``.

    Raises
    ------
    IndexError
        When it runs, if there are no steps: there is no last value then.

    Examples
    --------
    >>> import pytensor, scanlib
    >>> import pytensor.tensor as pt
    >>> x = pt.vector("x")
    >>> total = scanlib.reduce(lambda value, total: total + value, x, 0, return_updates=False)
    >>> float(pytensor.function([x], total)([1, 2, 3]))
    6.0
    """
    with called_as(function_called("reduce")):
        options = {"go_backwards": go_backwards, "mode": mode, "name": name}
        options |= {"return_updates": return_updates}
        found = scan(fn, sequences, outputs_info, non_sequences, **options)
    outputs = found.outputs if return_updates else found
    is_list = isinstance(outputs, list)
    result = [_last(output) for output in outputs] if is_list else _last(outputs)
    return found._replace(outputs=result) if return_updates else result


def _last(output: Any) -> Any:
    """Return the last row; carries that are no tensors are final values already, no output stays
    None."""
    return output[-1] if output is not None and is_tensor(output) else output


def foldl(
    fn: Callable[..., Any],
    sequences: Any,
    outputs_info: Any,
    non_sequences: Any = None,
    mode: Any = None,
    name: str | None = None,
    return_updates: bool = True,
) -> Any:
    """Reduce from the first row to the last: `reduce` with ``go_backwards=False``.

    Parameters, results and errors are those of `reduce`.

    Examples
    --------
    >>> import pytensor, scanlib
    >>> import pytensor.tensor as pt
    >>> x = pt.vector("x")
    >>> number = scanlib.foldl(lambda d, total: 10 * total + d, x, 0, return_updates=False)
    >>> float(pytensor.function([x], number)([1, 2, 3]))
    123.0
    """
    with called_as("foldl"):
        given = (fn, sequences, outputs_info, non_sequences)
        return reduce(*given, False, mode, name, return_updates)


def foldr(
    fn: Callable[..., Any],
    sequences: Any,
    outputs_info: Any,
    non_sequences: Any = None,
    mode: Any = None,
    name: str | None = None,
    return_updates: bool = True,
) -> Any:
    """Reduce from the last row to the first: `reduce` with ``go_backwards=True``.

    Parameters, results and errors are those of `reduce`.

    Examples
    --------
    >>> import pytensor, scanlib
    >>> import pytensor.tensor as pt
    >>> x = pt.vector("x")
    >>> number = scanlib.foldr(lambda d, total: 10 * total + d, x, 0, return_updates=False)
    >>> float(pytensor.function([x], number)([1, 2, 3]))
    321.0
    """
    with called_as("foldr"):
        given = (fn, sequences, outputs_info, non_sequences)
        return reduce(*given, True, mode, name, return_updates)


def filter(
    fn: Callable[..., Any],
    sequences: Any,
    non_sequences: Any = None,
    go_backwards: bool = False,
    mode: Any = None,
    name: str | None = None,
) -> Any:
    """Keep the rows of the sequences for which `fn` is true.

    Parameters
    ----------
    fn : callable
        Takes one row of each sequence, then the non-sequences, and returns one boolean for
        all sequences, or a list with one for each.
    sequences : variable, array_like, or list of these
        As in `scan`, without taps.
    go_backwards : bool, optional
        Read the sequences from their last row to their first. The kept rows
        come in the order of the steps.
    non_sequences, mode, name
        As in `scan`.

    Returns
    -------
    variable or list of variable
        The kept rows of each sequence.

    Raises
    ------
    ValueError
        If `fn` returns neither one mask nor one for each sequence.
    TypeError
        If a mask is not boolean.

    Examples
    --------
    >>> import pytensor, scanlib
    >>> import pytensor.tensor as pt
    >>> x = pt.vector("x")
    >>> kept = scanlib.filter(lambda value: value > 0, x)
    >>> pytensor.function([x], kept)([3, -1, 0, 2])
    array([3., 2.])
    """
    with called_as("filter"):
        options = {"go_backwards": go_backwards, "mode": mode, "name": name}
        masks, updates = scan(fn, sequences, None, non_sequences, return_list=True, **options)
    title = loop_title(name, "filter")
    if updates:
        raise ValueError(
            f"{title}: the predicate must not update shared variables, got updates of "
            f"{list(updates)}"
        )
    listed, single = list_sequences(sequences)
    rows: list[Variable] = []
    for i, given in enumerate(listed):
        if isinstance(given, dict):
            raise ValueError(
                f"{title}: sequences are given plain, without taps, got {given!r}; pass slices of "
                "one variable instead"
            )
        variable = as_variable(given, f"sequences[{i}]")
        rows.append(variable[::-1] if go_backwards else variable)
    if len(masks) not in (1, len(rows)):
        raise ValueError(
            f"{title}: there are {len(rows)} sequences, but the predicate returned {len(masks)} "
            "masks; return one for all sequences or one for each"
        )
    for mask in masks:
        if mask.type.dtype != "bool" or mask.type.ndim != 1:
            came = type_text(row_type(mask))
            raise TypeError(
                f"{title}: the predicate must return boolean scalars, got {came}; compare, as in "
                "x > 0, and take .all() or .any() of a row"
            )
    masks = masks * len(rows) if len(masks) == 1 else masks
    kept = [row[: mask.shape[0]][mask] for row, mask in zip(rows, masks, strict=True)]
    return kept[0] if single else kept


def scan_checkpoints(
    fn: Callable[..., Any],
    sequences: Any = None,
    outputs_info: Any = None,
    non_sequences: Any = None,
    name: str | None = "checkpointscan_fn",
    n_steps: Any = None,
    save_every_N: int = 10,  # noqa: N803
    padding: bool = True,
    return_updates: bool = True,
) -> Any:
    """Build a loop whose gradient stores every `save_every_N`-th step and computes the others anew.

    The call of `pytensor.scan_checkpoints`, without its limits: sequences may have taps and
    different lengths, outputs may have taps, `n_steps` may be less than the sequences allow and
    need not be a multiple of `save_every_N`, the step may update shared variables, draw random
    numbers and return `until`.

    Parameters
    ----------
    fn, sequences, outputs_info, non_sequences, name, n_steps, return_updates
        As in `scan`.
    save_every_N : int, optional
        The number of steps in a segment.
    padding : bool, optional
        Accepted for compatibility. The steps that fill no segment run as a shorter one; nothing
        is ever padded or copied.

    Returns
    -------
    outputs : variable, list of variable, or None
        The outputs of all steps, of shape ``(steps, …)``. `pytensor.scan_checkpoints` returns
        those at the ends of segments alone, which are
        ``outputs[save_every_N - 1 :: save_every_N]`` and the last one.
    updates : dict
        As in `scan`.

    Raises
    ------
    TypeError, ValueError
        As `scan` does; also if `save_every_N` is no positive integer.

    Notes
    -----
    T. Chen et al., "Training deep nets with sublinear memory cost", 2016. ``scan(…,
    checkpoint=…)`` has more schedules.

    Examples
    --------
    >>> import pytensor, scanlib
    >>> import pytensor.tensor as pt
    >>> h = pt.vector("h")
    >>> trace = scanlib.scan_checkpoints(
    ...     lambda h: h * (1.0 - 0.1 * h),
    ...     outputs_info=h,
    ...     n_steps=95,
    ...     save_every_N=10,
    ...     return_updates=False,
    ... )
    >>> gradient = pytensor.function([h], pytensor.grad(trace[-1].sum(), h))
    >>> gradient([1.0]).round(6)
    array([0.007822])
    """
    read_flag("scan_checkpoints", "padding", padding)
    save_every_N = read_integer("scan_checkpoints: save_every_N", save_every_N)  # noqa: N806
    if save_every_N < 1:
        raise ValueError(f"scan_checkpoints: save_every_N must be at least 1, got {save_every_N}")
    with called_as("scan_checkpoints"):
        options: dict[str, Any] = {"name": name, "return_updates": return_updates}
        options["checkpoint"] = save_every_N
        return scan(fn, sequences, outputs_info, non_sequences, n_steps, **options)
