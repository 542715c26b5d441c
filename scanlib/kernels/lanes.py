"""The numbers of one vector: what they give together, and how they become one."""

from collections.abc import Callable, Sequence

from scanlib.kernels.language import Type, Value, Writer


def over_lanes(w: Writer, value: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """Return what all lanes give together, in pairs of halves."""
    while value.type.lanes > 1:
        half = value.type.lanes // 2
        if half == 1:
            low, high = w.lane(value, 0), w.lane(value, 1)
        else:
            low, high = (w.shuffle(value, value, range(k, k + half)) for k in (0, half))
        value = combine(low, high)
    return value


def vector_of(w: Writer, numbers: Sequence[Value]) -> Value:
    """Return the vector whose lanes hold some numbers, each of which may be there several times."""
    first, *others = dict.fromkeys(numbers)
    kind = Type(first.type.dtype, len(numbers))
    found = w.as_value(first, kind)
    for number in others:
        own = w.constant([each is number for each in numbers], kind.of("bool"))
        found = w.select(own, w.as_value(number, kind), found)
    return found


def any_lane(w: Writer, flags: Value) -> Value:
    """Return whether a truth value holds in some lane."""
    return over_lanes(w, flags, lambda low, high: low | high)


def sum_of_lanes(w: Writer, value: Value) -> Value:
    return over_lanes(w, value, lambda low, high: low + high)
