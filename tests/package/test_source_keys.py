"""Keys of compiled code are made of the text that writes it (`scanlib.source_keys`)."""

import ast
from pathlib import Path

import pytest

import scanlib
from scanlib import source_keys

ROOT = Path(scanlib.__file__).parent
WRITER = "scanlib.backends.numba.general_loop"


@pytest.fixture
def change(monkeypatch):
    """Return a function that changes the text of a module, and gives the key of another one."""
    cached = (source_keys.source_key, source_keys._digest, source_keys._imported)
    texts = source_keys.text_of

    def key_after(module):
        with monkeypatch.context() as patch:
            patch.setattr(
                source_keys, "text_of", lambda name: texts(name) + "\n# changed" * (name == module)
            )
            for function in cached:
                function.cache_clear()
            found = source_keys.source_key(WRITER)
        for function in cached:
            function.cache_clear()
        return found

    return key_after


def test_the_key_changes_with_the_text_of_what_writes(change):
    key = change(None)
    assert change(None) == key
    for module in (
        WRITER,
        "scanlib.schedules.blocks",
        "scanlib.recurrences.affine",
        "scanlib.kernels.language",
    ):
        assert change(module) != key, module
    for module in (
        "scanlib.backends.numba.linker",
        "scanlib.frontend.scan_function",
        "scanlib.ops.scan",
    ):
        assert change(module) == key, module


def test_no_version_is_kept_by_hand():
    numbered = []
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                names = [ast.unparse(target) for target in node.targets]
                numbered += [f"{path.name}: {n}" for n in names if n.endswith("VERSION")]
    assert not numbered
