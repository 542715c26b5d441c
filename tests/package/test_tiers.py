"""Which tests `python -m pytest` runs, and which wait for ``--thorough``."""

from pathlib import Path

import pytest

from tests.conftest import default_tier, is_in_part


class Form:
    """What the choice looks at in a test that pytest has collected."""

    def __init__(self, module, name, *marks):
        self.path, self.name, self.marks = Path(f"tests/{module}.py"), name, marks
        self.nodeid = f"tests/{module}.py::{name}"

    def get_closest_marker(self, mark):
        return mark if mark in self.marks else None


def chosen(*forms):
    return {form.name for form in default_tier(list(forms))}


def test_one_form_that_does_not_wait_for_numba():
    names = ["test_a[numba-1]", "test_a[c-1]", "test_a[c-2]", "test_b[numba]", "test_c"]
    assert chosen(*(Form("m", name) for name in names)) == {"test_a[c-1]", *names[3:]}


def test_all_forms_with_the_mark_but_slow_ones():
    forms = [Form("m", f"test_a[{k}]", "all_forms") for k in range(3)]
    assert len(chosen(*forms, Form("m", "test_a[3]", "all_forms", "slow"))) == 3


def test_slow_forms_and_functions_wait():
    slow = [Form("m", "test_a[c]", "slow"), Form("m", "test_b", "slow")]
    quicker = Form("m", "test_a[numba]"), Form("m", "test_c")
    assert chosen(*slow, *quicker) == {"test_a[numba]", "test_c"}


def test_every_module_keeps_a_test():
    slow = [Form("m", "test_a[numba]", "slow"), Form("m", "test_a[c]", "slow")]
    assert chosen(*slow, Form("n", "test_b")) == {"test_a[c]", "test_b"}


def test_parts_are_all_tests_once():
    names = [f"tests/test_a.py::test_{k}" for k in range(50)]
    for parts in (1, 2, 3, 8):
        found = [[is_in_part(name, f"{k + 1}/{parts}") for k in range(parts)] for name in names]
        assert all(sum(places) == 1 for places in found)
        assert all(any(column) for column in zip(*found, strict=True))


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "one/two"])
def test_parts_that_do_not_exist(text):
    with pytest.raises(pytest.UsageError, match="--part: K/N with K from 1 to N"):
        is_in_part("tests/test_a.py::test_a", text)
