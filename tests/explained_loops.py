"""Loops to explain, and what is checked of every explanation."""

import json
import re

import pytensor.tensor as pt

import scanlib
from scanlib.explain.explanation import WIDTH

BLOCKS = "blocks of steps"
CHANNELS = "time outside, channels inside"
BY_WIDTH = "blocks of steps for few channels, else time outside, channels inside"
STEPS = "step by step in registers"
GENERAL = "one function for the loop, operation by operation in each step"


def scan(*args, **kwargs):
    return scanlib.scan(*args, return_updates=False, **kwargs)


def ar1(name="ar1"):
    x, phi = pt.dvector("x"), pt.dscalar("phi")
    y = scan(
        lambda x, y, phi: phi * y + x,
        sequences=x,
        outputs_info=pt.dscalar("y"),
        non_sequences=phi,
        name=name,
    )
    return x, phi, y


def rnn():
    x, w, start = pt.dmatrix("x"), pt.dmatrix("W"), pt.dvector("h")
    h = scan(
        lambda x, h, w: pt.tanh(x + pt.dot(w, h)),
        sequences=x,
        outputs_info=start,
        non_sequences=w,
        name="rnn",
    )
    return h


def explain_one(graph, mode=None):
    (loop,) = scanlib.explain(graph, mode).loops
    return loop


def reasons(loop):
    return " | ".join(map(str, loop.obstacles))


def check_forms(explanation):
    """Check that text, HTML and data can be made, and that the text is no wider than it may be."""
    text = str(explanation)
    assert text == str(explanation)
    for shown in (text, explanation.details()):
        assert max(map(len, shown.splitlines())) <= WIDTH
        assert not re.search(r"0x[0-9a-f]{6}", shown)
    data = json.loads(json.dumps(explanation.to_dict()))
    assert [loop["name"] for loop in data["loops"]] == [loop.name for loop in explanation.loops]
    html = explanation._repr_html_()
    assert html.count("<details") == html.count("</details>") == 1
    for loop in explanation.loops:
        assert loop.name.removesuffix("_gradient") in text
    return text
