"""The error guide: every message that users meet stands in it, and what stands in it is raised.

The guide, `docs/errors.md`, shows messages as what examples print; `test_docs` runs them and
compares. Here the sources are walked for what the guide has to hold.

Walked are the modules that users call: all of `scanlib.frontend` and `scanlib.explain`, and those
in which the names of ``scanlib.__all__`` are defined. Their `raise` statements and warnings count,
but for `AssertionError` and `NotImplementedError`. From all other modules the `UnknownLengthError`
counts, which a linker raises while a user's function is compiled. The rest of them checks graphs
that scanlib builds itself, and speaks to rewrites, or is said by running loops: those errors are
the classes of `scanlib.ops.errors`, which the guide has in a table.
"""

import ast
import functools
import importlib
import inspect
import re
from pathlib import Path

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.ops import errors
from tests.package.test_docs import examples_of_page

SOURCE = Path(scanlib.__file__).parent
GUIDE = SOURCE.parent / "docs" / "errors.md"
INTERNAL = {"AssertionError", "NotImplementedError"}
EXAMPLES = examples_of_page(GUIDE)
RAISED = [" ".join(example.exc_msg.split()) for example in EXAMPLES if example.exc_msg]
PRINTED = re.findall(  # what takes PyMC to be raised
    r"^```text\n(\w+: .*)\n```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE
)
JAX_ROWS = re.findall(
    r"^\| (.*) \| .* \|$",
    GUIDE.read_text(encoding="utf-8").partition("\n## Lengths that JAX does not know\n")[2],
    re.MULTILINE,
)[1:]


def walked_modules():
    """Return the modules whose messages all have to be in the guide."""
    modules = {inspect.getmodule(getattr(scanlib, name)) for name in scanlib.__all__}
    public = {Path(module.__file__) for module in modules - {None, scanlib}}
    packages = [SOURCE / "frontend", SOURCE / "explain"]
    return public.union(*(package.rglob("*.py") for package in packages))


class Messages:
    """The messages of one module, as patterns of what they may become."""

    def __init__(self, path):
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.functions = {n.name: n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef)}
        self.raising = {n.exc for n in ast.walk(self.tree) if isinstance(n, ast.Raise)}
        self.raising -= {n.exc for node in ast.walk(self.tree) for n in caught_here(node)}
        self.texts = imported_texts(self.tree) | texts_of(self.tree.body)

    def raised(self):
        """Return name of the class, line, and message of every error and warning."""
        for function in self.functions.values():
            texts = self.texts | texts_of(ast.walk(function))
            parameters = {parameter.arg for parameter in function.args.args}
            for node in ast.walk(function):
                if not isinstance(node, ast.Call) or not node.args:
                    continue
                if isinstance(node.args[0], ast.Name) and node.args[0].id in parameters:
                    continue  # the text is where the function is called
                name = "|".join(classes_of(node.func))
                if name == "warn":
                    # As an error, too: with strict=True, or where warnings are errors.
                    yield r"\w+", node.lineno, self.pattern(node.args[0], texts)
                elif node in self.raising:
                    yield name, node.lineno, self.pattern(node.args[0], texts)

    def pattern(self, node, texts):
        """Return a regular expression for the text that an expression gives."""
        match node:
            case ast.Constant(value=str(text)):
                return re.escape(" ".join(f"x{text}x".split())[1:-1])
            case ast.JoinedStr(values=values):
                return "".join(self.pattern(value, texts) for value in values)
            case ast.FormattedValue(value=value, conversion=-1):
                return self.pattern(value, texts)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.pattern(left, texts) + self.pattern(right, texts)
            case ast.IfExp(body=body, orelse=orelse):
                return f"(?:{self.pattern(body, texts)}|{self.pattern(orelse, texts)})"
            case ast.Name(id=name) if name in texts:
                return self.pattern(texts[name], texts)
            case ast.Call(func=ast.Name(id=name)) if name in self.functions:
                nodes = ast.walk(self.functions[name])
                returned = [n.value for n in nodes if isinstance(n, ast.Return)]
                return f"(?:{'|'.join(self.pattern(value, {}) for value in returned)})"
        return ".*"


def texts_of(nodes):
    """Return the texts that names are bound to."""
    bound = {}
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant() | ast.JoinedStr()):
                bound[name] = node.value
    return bound


def imported_texts(tree):
    """Return the texts that a module takes from other modules of scanlib."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("scanlib."):
            path = (SOURCE.parent / node.module.replace(".", "/")).with_suffix(".py")
            texts = texts_of(ast.parse(path.read_text("utf-8")).body) if path.exists() else {}
            names = {alias.name for alias in node.names}
            bound |= {name: text for name, text in texts.items() if name in names}
    return bound


def classes_of(called):
    """Return the names of the classes, or the function, that a call may be of."""
    if isinstance(called, ast.IfExp):
        return [*classes_of(called.body), *classes_of(called.orelse)]
    return [ast.unparse(called).split(".")[-1]]


def caught_here(node):
    """Yield what is raised in the body of a `try` that catches everything and says it anew."""
    if isinstance(node, ast.Try) and any(
        isinstance(handler.type, ast.Name) and handler.type.id == "Exception"
        for handler in node.handlers
    ):
        for statement in node.body:
            yield from (n for n in ast.walk(statement) if isinstance(n, ast.Raise))


@functools.cache
def messages():
    """Return class, place and pattern of every message that has to be in the guide."""
    walked = walked_modules()
    found = [
        (kind, f"{path.relative_to(SOURCE)}:{line}", pattern)
        for path in sorted(SOURCE.rglob("*.py"))
        if path in walked or "raise UnknownLengthError" in path.read_text(encoding="utf-8")
        for kind, line, pattern in Messages(path).raised()
        if kind == "UnknownLengthError" or (path in walked and kind not in INTERNAL)
    ]
    return list(dict.fromkeys(found))  # functions inside functions are met twice


def test_every_message_is_in_the_guide():
    found = messages()
    assert len(found) > 100, "the walk finds what there is"
    texts = [*RAISED, *PRINTED, *(f"UnknownLengthError: {row}" for row in JAX_ROWS)]
    missing = [
        f"{kind} at {place}: {pattern}"
        for kind, place, pattern in found
        if not any(re.search(rf"\b(?:{kind}): .*{pattern}", text) for text in texts)
    ]
    assert not missing, "\n".join(["not in docs/errors.md:", *missing])


def test_messages_say_something():
    """No pattern is so loose that any text would match it."""
    loose = [p for _, p, pattern in messages() if len(re.sub(r"\.\*|\W", "", pattern)) < 12]
    assert not loose


def test_the_table_has_the_errors_of_running_loops():
    text = GUIDE.read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE))
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and name != "LoopError"
    }
    assert rows == classes | {"IndexError"}
    raised = {message.partition(":")[0].split(".")[-1] for message in RAISED}
    assert rows <= raised, "an example raises each"


X = np.linspace(0.1, 1.0, 6)
x = pt.dvector("x")


def loop(*arguments, **options):
    return scanlib.scan(*arguments, return_updates=False, **options)


def until(x):
    """Return a trace whose length is found by the loop."""
    return loop(lambda x, h: (pt.sin(h) + x, scanlib.until(h > 1.5)), x, pt.constant(0.0))


def positive(x):
    return pt.sum(x > 0)


def segments(x):
    h = loop(lambda x, h: pt.sin(h) + x, until(x), pt.constant(0.0), checkpoint=2)
    return pytensor.grad(h[-1], x)


def cut(x):
    h = loop(lambda a, b, h: pt.sin(h) + a * b, [x[: positive(x)], x], pt.constant(0.0))
    return pytensor.grad(h[-1], x)


UNKNOWN = {
    "how many rows state 0": lambda x: pt.outer(until(x), x).T.flatten(),
    "how many items a mask selects": lambda x: (
        pt.outer(x, x)[x > 0.5, (0 * x).astype("int64")].sum() + until(x)[-1]
    ),
    "how many rows an array of the items": lambda x: pt.sort(x[x > 0.5]) + until(x)[-1],
    "how many rows the results of a loop": lambda x: loop(
        lambda h: pt.sin(h) + 1, None, pt.constant(0.0), n_steps=positive(x)
    ),
    "the gradient of a sequence": cut,
    "how large an array is": lambda x: pt.full((positive(x),), until(x)[-1]),
    "which part of an array is written": lambda x: pt.set_subtensor(until(x)[::2], 0.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", UNKNOWN)
def test_what_jax_does_not_know(part):
    pytest.importorskip("jax")
    (row,) = [row for row in JAX_ROWS if part in row]
    bounded = importlib.import_module("scanlib.backends.jax.bounded")
    with pytest.raises(bounded.UnknownLengthError) as error:
        pytensor.function([x], UNKNOWN[part](x), mode="JAX")(X)
    assert str(error.value).startswith(row)


@pytest.mark.slow
def test_checkpoints_of_so_many_steps_as_jax_does_not_know():
    pytest.importorskip("jax")
    bounded = importlib.import_module("scanlib.backends.jax.bounded")
    with pytest.raises(bounded.UnknownLengthError, match="how large an array is"):
        pytensor.function([x], segments(x), mode="JAX")(X)


def test_every_row_about_jax_is_raised():
    assert len(JAX_ROWS) == len(UNKNOWN)
