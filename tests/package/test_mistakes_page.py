"""The page of mistakes: each of its lines, run, says what the page says."""

import re
import warnings
from functools import partial

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from tests.checks import in_python
from tests.package.test_docs import ROOT

ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in (ROOT / "docs" / "mistakes.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and "scan(" in line
]


def outcome(code):
    """Return what a line of the page gives: a value or an error, and a warning."""
    x = pt.dvector("x")
    namespace = {
        "np": np,
        "pt": pt,
        "until": scanlib.until,
        "scan": partial(scanlib.scan, return_updates=False),
        "x": x,
        "rate": pt.dscalar("rate"),
        "rng": pt.random.rng("rng"),
        "total": pytensor.shared(0.0, name="total"),
        "run": lambda result: in_python([x], result)(np.array([1.0, 2.0, 3.0])),
    }
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            said = str(eval(code, namespace))
        except Exception as error:
            text = str(error).split("\nApply node")[0]
            said = f"{type(error).__name__}: {text}"
    given = [f"{x.category.__name__}: {x.message}" for x in seen if x.filename == "<string>"]
    return [" ".join(text.split()) for text in (said, *given)]


def test_there_are_enough_rows():
    assert len(ROWS) >= 20
    assert all(len(row) == 4 for row in ROWS)


@pytest.mark.all_forms
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_rows(row):
    _, code, here, _ = row
    spans = re.findall(r"`` (.*?) ``(?=;|$)|`([^`]*)`", here)
    expected = [" ".join("".join(span).split()) for span in spans]
    said = outcome(code.strip("`"))
    assert len(said) == len(expected)
    for text, shown in zip(said, expected, strict=True):
        pattern = ".*".join(re.escape(part) for part in shown.split("…"))
        assert re.match(f"{pattern}$", text), text
