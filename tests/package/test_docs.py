"""The documentation: its examples run and print what the pages show, its links lead somewhere.

Pages are written in Markdown. A ``python`` block either holds a session with ``>>>``, whose
outputs are compared, or a script; the ``text`` block right after a script shows what it prints.
The blocks of a page share a namespace, so they are run in order, as one test.
"""

import contextlib
import doctest
import inspect
import io
import re
import traceback
from pathlib import Path

import pytest
from pytensor.configdefaults import config

import scanlib

ROOT = Path(__file__).resolve().parents[2]
# For those who change the package: a map, proposals with programs that do not need it, notes, and
# what is in each room.
MAP, UPSTREAM = ROOT / "docs" / "architecture.md", ROOT / "docs" / "upstream.md"
NOTES = sorted((ROOT / "docs" / "design").glob("*.md"))
ROOMS = sorted((ROOT / "scanlib").rglob("README.md"))
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").glob("*.md")} - {MAP, UPSTREAM})]
LINKING = [*PAGES, MAP, UPSTREAM, *NOTES, *ROOMS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
TOPS = (ROOT, ROOT / "scanlib")
PUBLIC = [name for name in scanlib.__all__ if name != "__version__"]

BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ (?P<title>.*)$", re.MULTILINE)
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def page_id(page):
    return str(page.relative_to(ROOT))


def examples_of_page(page):
    """Return the examples of a page, each with the line of the page on which it starts."""
    text = page.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    examples = []
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block["language"] != "python":
            continue
        first = text.count("\n", 0, block.start()) + 1
        if block["text"].startswith(">>>"):
            found = doctest.DocTestParser().get_examples(block["text"], page_id(page))
            for example in found:
                example.lineno += first
            examples += found
            continue
        example = doctest.Example(block["text"], "", lineno=first)
        example.shown = (
            following is not None
            and following["language"] == "text"
            and not text[block.end() : following.start()].strip()
        )
        if example.shown:
            example.want = following["text"]
        examples.append(example)
    return examples


def run(example, namespace):
    """Run one example and return what it prints, an exception as Python shows it."""
    is_session = not hasattr(example, "shown")
    code = compile(example.source, "<example>", "single" if is_session else "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(code, namespace)
        except Exception as error:
            if example.exc_msg is None:
                raise
            # PyTensor adds notes about the function that was running.
            error.__notes__ = []
            return "".join(traceback.format_exception_only(error))
    return printed.getvalue()


def check(examples, where):
    """Run examples in one namespace and compare what they print."""
    namespace = {"__name__": "__main__"}
    checker = doctest.OutputChecker()
    for example in examples:
        place = f"{where}, line {example.lineno}"
        try:
            printed = run(example, namespace)
        except Exception as error:
            error.add_note(f"{place}:\n{example.source}")
            raise
        expected = example.want if example.exc_msg is None else example.exc_msg
        if not getattr(example, "shown", True):
            continue
        if not checker.check_output(expected, printed, FLAGS):
            pytest.fail(
                f"{place}:\n{example.source}\nexpected:\n{expected}\nprinted:\n{printed}",
                pytrace=False,
            )


def skip_without_packages(examples):
    """Skip examples of JAX's meshes where there is no JAX, and of models where there is no PyMC."""
    lines = {line for example in examples for line in example.source.splitlines()}
    if any(line.startswith("import jax") for line in lines):
        pytest.importorskip("jax")
    if "import pymc as pm" in lines:
        flags = config.gcc__cxxflags
        pytest.importorskip("pymc")
        config.gcc__cxxflags = flags  # other tests' code would be compiled once more for PyMC's


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_examples_of_a_page(page):
    examples = examples_of_page(page)
    assert examples, f"{page_id(page)} has no example"
    skip_without_packages(examples)
    check(examples, page_id(page))


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLIC)
def test_examples_of_a_docstring(name):
    docstring = inspect.getdoc(getattr(scanlib, name))
    assert docstring, f"scanlib.{name} has no docstring"
    examples = doctest.DocTestParser().get_examples(docstring)
    assert examples, f"the docstring of scanlib.{name} has no example"
    skip_without_packages(examples)
    check(examples, f"scanlib.{name}")


def anchors(page):
    """Return the anchors of a page's headings, made the way GitHub makes them."""
    titles = [match["title"] for match in HEADING.finditer(without_blocks(page))]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def without_blocks(page):
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def test_the_map_is_a_map():
    text = MAP.read_text(encoding="utf-8")
    assert text.count("\n") <= 160
    assert all(f"(design/{note.name})" in text for note in NOTES)
    rooms = {room.parent.relative_to(ROOT).as_posix() for room in ROOMS}
    assert all(f"(../{room}/README.md)" in text for room in rooms)
    named = set(re.findall(r"`((?:\w+/)+\w+\.\w+)`", text))
    missing = [name for name in named if not any((top / name).exists() for top in TOPS)]
    assert not missing, "files that the map names"


@pytest.mark.all_forms
@pytest.mark.parametrize(
    "package", sorted((ROOT / "scanlib").rglob("__init__.py")), ids=lambda path: path.parent.name
)
def test_rooms_say_what_they_hold(package):
    """Every module is named in the README of its room, and its tables name nothing else."""
    room = package.parent
    if room == ROOT / "scanlib":
        return  # the map is about it
    text = (room / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 100
    modules = {path.stem for path in room.glob("*.py")} - {"__init__"}
    assert modules <= set(re.findall(r"`(\w+)\.py`", text))
    assert set(re.findall(r"^\| `(\w+)\.py` \|", text, re.MULTILINE)) <= modules


@pytest.mark.all_forms
@pytest.mark.parametrize("page", LINKING, ids=page_id)
def test_links_of_a_page(page):
    for match in LINK.finditer(without_blocks(page)):
        target, _, anchor = match["target"].partition("#")
        if target.startswith(("http://", "https://")):
            continue
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), f"{match['target']} does not exist"
        if anchor:
            assert anchor in anchors(linked), f"{match['target']}: no such heading"


def plain_signature(name):
    signature = inspect.signature(getattr(scanlib, name))
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return f"scanlib.{name}{inspect.Signature(parameters)}"


@pytest.mark.all_forms
@pytest.mark.parametrize("name", PUBLIC)
def test_the_reference_has_the_signature(name):
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert plain_signature(name) in " ".join(text.split())


def test_the_reference_is_complete():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    flags = [name for name in config._config_var_dict if name.startswith("scanlib__")]
    assert flags
    missing = [name for name in PUBLIC if f"### `scanlib.{name}`" not in text]
    missing += [name for name in flags if f"`{name}`" not in text]
    assert not missing
