"""The step function: calling it, reading what it returns, finding what it captures."""

import inspect
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.gradient import GradClip
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import ancestors, graph_inputs, toposort
from pytensor.graph.utils import MissingInputError
from pytensor.scan.utils import until as classic_until
from pytensor.tensor.random.op import RNGConsumerOp
from pytensor.tensor.random.type import RandomType

from scanlib._compat import variable_number
from scanlib.frontend.arguments import OutputArgument, describe_whole
from scanlib.frontend.lags import Lags
from scanlib.frontend.states import type_text
from scanlib.frontend.trees import flatten
from scanlib.frontend.values import as_variable
from scanlib.ops.counted_rows import counts_by
from scanlib.ops.graph import is_tensor, read_from_outside

ONE_VECTOR = "to return one vector write pt.stack([...]): a list is several values"
_MISSING = "; outputs_info gives past values, non_sequences what is the same at every step"


class until:  # noqa: N801
    """Mark the condition that ends a loop.

    A step function returns it last. The loop stops after the step in which the condition is
    true; that step's values are part of the result.

    Parameters
    ----------
    condition : Variable or array_like
        A scalar. Anything but zero is true.

    Raises
    ------
    TypeError
        If the condition is not a scalar.

    Examples
    --------
    >>> import pytensor, scanlib
    >>> import pytensor.tensor as pt
    >>> limit = pt.scalar("limit")
    >>> powers = scanlib.scan(
    ...     lambda power, limit: (power * 2, scanlib.until(power * 2 > limit)),
    ...     outputs_info=pt.constant(1.0),
    ...     non_sequences=limit,
    ...     n_steps=1024,
    ...     return_updates=False,
    ... )
    >>> print(pytensor.function([limit], powers)(45))
    [ 2.  4.  8. 16. 32. 64.]
    """

    def __init__(self, condition: Any) -> None:
        self.condition = read_condition(as_variable(condition, "the condition of `until`"))


def read_condition(condition: Variable) -> Variable:
    """Return the condition that ends a loop."""
    if not is_tensor(condition) or condition.type.ndim != 0:
        raise TypeError(f"the condition of `until` must be a scalar, got {condition.type}")
    return condition


class StepResult(NamedTuple):
    """What one call of a step function returned."""

    outputs: list[Variable]
    updates: dict[SharedVariable, Any]
    stop: Variable | None


@contextmanager
def errors_of(title: str) -> Iterator[None]:
    """Have errors about the arguments and results of a loop begin with the loop's title."""
    try:
        yield
    except (TypeError, ValueError, MissingInputError) as error:
        if not str(error).startswith(title):
            error.args = (f"{title}: {error}",)
        raise


def call_step(
    fn: Callable[..., Any],
    arguments: Sequence[tuple[Variable, str]],
    described: Sequence[OutputArgument],
    title: str,
) -> StepResult:
    """Call a step function and sort what it returns.

    `arguments` are the variables to call it with, and what each of them is for messages.
    `TypeError` if the function takes another number of arguments, or returns no variables;
    `ValueError` if it returns another number of outputs than are described.
    """
    variables, texts = [variable for variable, _ in arguments], [text for _, text in arguments]
    missing = "" if title.startswith(("map", "filter")) else _MISSING
    returned = call_function(fn, variables, texts, f"{title}: the step", missing)
    with errors_of(title):
        result = _sort_returned(returned)
    if described and len(result.outputs) != len(described):
        texts = [describe_whole(output.name, output.argument) for output in described]
        number = f"{len(texts)} output{'s' if len(texts) > 1 else ''}"
        raise ValueError(
            f"{title}: outputs_info describes {number}, {', '.join(texts)}; "
            f"{step_name(fn)} returned {len(result.outputs)}; give one entry per output, None for "
            f"those that no step reads{_one_output(described[0], result.outputs)}"
        )
    return result


def _one_output(described: OutputArgument, outputs: Sequence[Variable]) -> str:
    """Return what a step may have meant that returns several outputs where one is described."""
    initial = described.initial
    if initial is not None and is_tensor(initial):
        ndim = described.read_type().ndim
        if ndim and all(is_tensor(v) and v.type.ndim == ndim - 1 for v in outputs):
            return f"; {ONE_VECTOR}"
    is_pair = len(outputs) == 2
    return "; steps that return (carry, y) are for scanlib.loop(step, init, xs)" * is_pair


def call_function(
    fn: Callable[..., Any],
    arguments: Sequence[Any],
    texts: Sequence[str],
    where: str,
    missing: str = "",
) -> Any:
    """Call a function that a user wrote; `texts` say what each argument is.

    Errors from inside it get a note that says what it was called with. `TypeError` if it takes
    another number of arguments (`missing` says where more would come from), or returns a generator.
    """
    fits = _takes(fn, arguments)
    before = _model_variables()
    try:
        returned = fn(*arguments)
    except Exception as error:
        if isinstance(error, TypeError) and not fits and not _was_entered(fn, error):
            text = _misfit(fn, texts, missing)
            raise TypeError(f"{where} is called with {text}") from None
        error.add_note(
            f"{where} is called before the loop runs, with symbolic variables: "
            f"{'; '.join(map(_with_types, texts, arguments))}. {_instead(error)}".rstrip()
        )
        raise
    for variable, advice in _model_variables().items():
        if variable not in before:
            raise ValueError(
                f"{where} makes `{variable.name}`, a variable of the PyMC model, which then has it "
                f"once, not once for each step; {advice}"
            )
    if inspect.isgenerator(returned):
        raise TypeError(
            f"{where} {step_name(fn)} returns a generator; write `return` in place of `yield`, and "
            "a list in place of a generator expression"
        )
    return returned


# What a step adds to a model is made of the symbols of a step, and the error of that comes late and
# from elsewhere. Data that it makes are the same at every step.
_ADVICE = {
    "free_RVs": "make it before the loop, with a row for each step, and pass it as a sequence, or "
    "draw by `.dist` in a step that a pm.CustomDist has in its `dist`",
    "observed_RVs": "return from the step what its density needs, and make it after the loop, of "
    "the rows of all steps",
    "deterministics": "return it from the step, and pass the loop's result to pm.Deterministic",
    "potentials": "return it from the step, and pass the loop's result to pm.Potential",
}


def _model_variables() -> dict[Variable, str]:
    """Return the variables of the PyMC model that is open, and where to make such instead."""
    model_class = getattr(sys.modules.get("pymc"), "Model", None)
    if model_class is None:
        return {}
    model = model_class.get_context(error_if_none=False, allow_block_model_access=True)
    return {v: advice for kind, advice in _ADVICE.items() for v in getattr(model, kind, ())}


# What to write in a step in place of what Python, NumPy and JAX have, by the text of their errors.
_READ_TABLE = "pt.as_tensor(table)[i] reads a list or an array of NumPy at a symbolic place"
_INSTEAD = {
    "Length of .* cannot be determined|.* has no len": (
        "Python cannot count the items of a variable: write y[0], y[1] for `a, b = y`, "
        "y.sum() for sum(y), y.shape[0] for len(y), scanlib.map or another loop for `for`."
    ),
    ".* converted to Python boolean|Cannot cast True or False": (
        "A step has symbols where Python wants values. In place of `if` write pt.where(condition, "
        "a, b), of `and`, `or`, `not` write &, |, ~, of `a < b < c` (a < b) & (b < c), of `max` "
        "and np.maximum pt.maximum; `until` ends the loop."
    ),
    ".* converted to Python|unsupported format|.*define __": (
        "A step has symbols where Python wants values. In place of `float` and `int` write "
        "pt.cast, of `round` pt.round, of `math` functions of pytensor.tensor, such as pt.exp, of "
        f"`range` another loop; {_READ_TABLE}."
    ),
    "setting an array element|only integers, slices|Unsupported dtype .* object": (
        "NumPy knows no symbols: write functions of pytensor.tensor, such as pt.where and "
        f"pt.stack; {_READ_TABLE}."
    ),
    ".* item assignment|.* no attribute 'at'": (
        "A variable does not change: write h = h[i].set(v) in place of h[i] = v and h.at[i].set(v),"
        " and h[i].inc(v) in place of h[i] += v."
    ),
    ".*ind(ex|ices) must be integers|Shape must be integers": (
        "Write i // 2 in place of i / 2, pt.cast(i, 'int64') for an index that was computed as a "
        "float, and give integers as integers: pt.lvector, or an array of NumPy of dtype int64."
    ),
    "unsupported operand.*NoneType|'NoneType' object|Cannot convert None": (
        "None has no value: without `xs` a row is None, and so is what a function without a "
        "`return` gives."
    ),
    r"unsupported operand.* for (<<|>>)": (
        "Variables have no << and >>: write v * 2**k and v // 2**k, with constants of the dtype of "
        "v where it is unsigned, such as np.uint32(2**k); they have &, |, ^ and ~."
    ),
    "unsupported operand.*'Lags'|Cannot convert lags": (
        "Lags hold several values: write v[1] for the one before, and sum(v) for the sum of all."
    ),
    "'str' object cannot be interpreted": (
        "What starts without named dims has none in the first call: give an initial value that has "
        "them."
    ),
    "'TensorVariable' object has no attribute": (
        "A variable has the methods that arrays of NumPy have, such as v.astype, v.reshape and "
        "v.sum; all else is a function of pytensor.tensor, or an index, such as v[None]."
    ),
    "unsupported operand.*'tuple'": (
        "A draw is a pair, the next generator and what was drawn: next_rng, value = rng.normal()."
    ),
    "module 'pytensor.tensor' has no attribute": (
        "Some names are others: pt.special.softmax and pt.special.log_softmax, pt.maximum(v, 0) "
        "for relu, pt.where for cond and select, pt.linalg for numpy.linalg."
    ),
    ".*unexpected keyword argument '(dim|keepdim)'": (
        "PyTensor has NumPy's names: axis in place of dim, keepdims in place of keepdim."
    ),
    r".*reshape\(\) takes": "The new shape is one tuple: v.reshape((2, -1)).",
    r".*takes .* positional arguments? but|.*missing \d+ required": "",  # it says all there is
    "maximum recursion depth": "The items of a row have numbers, x[0], not names.",  # PyTensor's
}
_OTHER_PACKAGES = (
    "Functions of NumPy, SciPy, JAX and PyTorch know no symbols: write those of pytensor.tensor."
)


def _instead(error: Exception) -> str:
    """Return what to write in a step in place of what raised an error, where that can be told."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if frame.f_globals.get("__name__", "").startswith("scanlib."):  # it says so itself
        return ""
    advice = (text for pattern, text in _INSTEAD.items() if re.match(pattern, str(error)))
    package = frame.f_globals.get("__name__", "").split(".")[0]
    mine = isinstance(error, TypeError) and package != "pytensor"
    is_other = mine or package in ("jax", "numpy", "scipy", "torch")
    return next(advice, _OTHER_PACKAGES * is_other)


def _with_types(text: str, argument: Any) -> str:
    """Return what an argument is, how it is read, and the types of the variables in it."""
    if argument is None:
        return f"{text}: None"
    if isinstance(argument, dict):
        text += f", a dict with the keys {', '.join(map(repr, argument))}"
    elif isinstance(argument, tuple | list | Lags):
        first = argument.first if isinstance(argument, Lags) else 0
        text += f", {type(argument).__name__}, to be read as v[{first}]"
    types = [type_text(leaf.type) for leaf in flatten(argument)[0] if isinstance(leaf, Variable)]
    return f"{text}: {', '.join(types)}" if types else text


def _takes(fn: Callable[..., Any], arguments: Sequence[Any]) -> bool:
    """Whether a function can be called with these arguments; yes where it does not tell."""
    try:
        inspect.signature(fn).bind(*arguments)
    except ValueError:  # it has no signature
        return True
    except TypeError:
        return False
    return True


def _was_entered(fn: Callable[..., Any], error: TypeError) -> bool:
    """Whether an error comes from inside a function, whatever its signature says."""
    code = getattr(inspect.unwrap(getattr(fn, "func", fn)), "__code__", None)
    return any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))


def step_name(fn: Callable[..., Any]) -> str:
    """Return the name that a step function was defined with, or that of its class."""
    fn = getattr(fn, "func", fn)  # of functools.partial
    return f"`{getattr(fn, '__name__', None) or type(fn).__name__}`"


def _misfit(fn: Callable[..., Any], texts: Sequence[str], missing: str) -> str:
    """Say what a function is called with, what it takes instead, and what to write."""
    parameters = inspect.signature(fn).parameters.values()
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(p.default is p.empty for p in places)
    takes = f"takes {needed}"
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        takes += " or more"
    elif len(places) > needed:
        takes += f" to {len(places)}"
    advice = "write one parameter for each, in this order"
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if keywords:
        takes += f", and needs the keywords {', '.join(keywords)}"
        advice += ", and give keywords a value, as functools.partial does"
    count = "1 argument" if len(texts) == 1 else f"{len(texts)} arguments"
    called = ": ".join(filter(None, [count, ", ".join(texts)]))
    return f"{called}; {step_name(fn)} {takes}; {advice}{missing * (needed > len(texts))}"


def is_until(value: Any) -> bool:
    """Whether a step returned a condition, scanlib's or PyTensor's."""
    return isinstance(value, until | classic_until)


def _is_updates(value: Any) -> bool:
    if isinstance(value, dict):
        return True
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(
            isinstance(pair, list | tuple)
            and len(pair) == 2
            and isinstance(pair[0], SharedVariable)
            for pair in value
        )
    )


def _sort_returned(returned: Any) -> StepResult:
    """Split a step's return value into outputs, updates and condition."""
    if returned is None:
        raise TypeError(
            "the step function returned None: it has no `return`, or a path without one; return "
            "the outputs, or {} if there are none"
        )
    if _is_updates(returned) or is_until(returned) or isinstance(returned, Variable):
        returned = [returned]
    if not isinstance(returned, list | tuple):
        raise TypeError(_not_a_variable(returned))
    items = list(returned)
    stop = None
    if items and is_until(items[-1]):
        stop = items.pop().condition
    updates: dict[Any, Any] = {}
    outputs: list[Any] = []
    structured = len(items) <= 2 and any(isinstance(item, list | tuple | dict) for item in items)
    for item in items:
        if _is_updates(item):
            named = [key for key in dict(item) if isinstance(key, str)]
            if named:
                raise TypeError(
                    f"the step function returned a dict with the key {named[0]!r}, but a dict "
                    "holds updates of shared variables; return the outputs as a list, in the "
                    "order of outputs_info, or use scanlib.loop, whose states may be a dict"
                )
            updates.update(dict(item))
        elif structured and isinstance(item, list | tuple):
            outputs.extend(item)
        else:
            outputs.append(item)
    for output in outputs:
        if is_until(output):
            raise ValueError("`until` must be the last thing that the step function returns")
        if not isinstance(output, Variable):
            raise TypeError(_not_a_variable(output))
    return StepResult(outputs, updates, stop)


def _not_a_variable(value: Any) -> str:
    advice = "Wrap constants with pytensor.tensor.constant"
    if isinstance(value, np.ndarray) and value.dtype == object:
        advice = "It holds variables; write pt.stack in place of np.array and np.stack"
    elif value is until or value is classic_until:
        advice = "Write until(condition)"
    elif value is None:
        advice = "Leave it out; steps that return (carry, None) are for scanlib.loop"
    elif isinstance(value, str | bytes):
        advice = "Text cannot be stacked over time; leave it out"
    return (
        "a step function returns PyTensor variables, then updates of shared variables, then "
        f"`until`; got {value!r} of type {type(value).__name__}. "
        f"{advice}"
    )


def read_updates(
    result: StepResult, new_shared: Iterable[SharedVariable], values: Iterable[Variable]
) -> dict[SharedVariable, Variable]:
    """Return the update of every shared variable that changes from step to step.

    Those are the variables that the step names in its updates, and those it created itself
    (a `RandomStream` does) that carry a default update.
    """
    updates: dict[SharedVariable, Variable] = {}
    for shared, value in result.updates.items():
        if not isinstance(shared, SharedVariable):
            raise TypeError(
                f"the step function returned an update for {shared!r}, which is not a shared "
                "variable; use outputs_info for values that are passed from step to step"
            )
        updates[shared] = _check_update(shared, value)
    used = set(ancestors([*values, *updates.values()]))
    for shared in new_shared:
        default = shared.default_update
        if shared in used and shared not in updates and default is not None:
            updates[shared] = _check_update(shared, default)
        if shared in used and default is not None:
            # Otherwise compiling would pick up an update that reads variables of the step.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                shared.default_update = None
    return updates


def _check_update(shared: SharedVariable, value: Any) -> Variable:
    try:
        return shared.type.filter_variable(value)
    except (AttributeError, TypeError, ValueError):
        pass
    came = getattr(value, "type", type(value).__name__)
    raise TypeError(
        f"the update of shared variable {shared} has type {came}, but the variable has type "
        f"{shared.type}; cast the update or change the variable's type"
    )


def captured_variables(
    outputs: Sequence[Variable], placeholders: Sequence[Variable], first: int | None = None
) -> list[Variable]:
    """Return the variables that a step reads from outside: the largest expressions that do
    not depend on the step. They become inputs of the loop, so they are computed once.

    A distribution of PyMC that draws one number without a generator is of the step: the density
    of a mixture is derived from it. So is a gradient that the step clips, which is the gradient of
    each step and not their sum: what the step made has a `variable_number` of `first` at least.
    """
    nodes = list(toposort(outputs, blockers=list(placeholders)))

    def is_of_step(node: Apply) -> bool:
        if isinstance(node.op, GradClip):
            return first is not None and variable_number(node.outputs[0]) >= first
        draws = isinstance(node.op, RNGConsumerOp)
        return draws and not any(isinstance(inp.type, RandomType) for inp in node.inputs)

    dependent = set(placeholders)
    for node in nodes:
        if is_of_step(node) or any(inp in dependent for inp in node.inputs):
            dependent.update(node.outputs)
    read = read_from_outside(nodes, outputs, dependent, counts_by)
    return [variable for variable in read if not isinstance(variable, Constant)]


def check_strict(captured: Sequence[Variable], non_sequences: Sequence[Variable]) -> None:
    """Raise a `MissingInputError` that names the outer variables which a step reads and that were
    not passed as `non_sequences`."""
    roots, allowed = graph_inputs(captured, blockers=non_sequences), set(non_sequences)
    leaves = [v for v in roots if not isinstance(v, Constant) and v not in allowed]
    if leaves:
        names = ", ".join(str(leaf) for leaf in leaves)
        raise MissingInputError(
            f"with strict=True the step function may only use what it is given, but it also "
            f"reads {names}; add this to non_sequences or pass strict=False"
        )
