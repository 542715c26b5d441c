"""Switching adoption on and off: loops of `pytensor.scan` compiled as scanlib's loops."""

from collections.abc import Iterator
from contextlib import contextmanager

from pytensor.configdefaults import config


def enable() -> None:
    """Compile loops built with `pytensor.scan` as scanlib's loops from now on.

    Every function that is compiled afterwards, in this process, has its loops of
    `pytensor.scan` adopted: gradients included, whether they were taken before or after.
    Functions that are compiled already stay as they are.

    See Also
    --------
    disable : The opposite.
    enabled : For some functions only.

    Notes
    -----
    The same as the flag ``scanlib__adopt=True``. For one function, compile it with
    ``mode.including("scanlib_adopt")`` instead.

    Examples
    --------
    >>> import pytensor, pytensor.tensor as pt, scanlib
    >>> x = pt.dvector("x")
    >>> y = pytensor.scan(lambda x, y: 0.5 * y + x, x, pt.zeros(()), return_updates=False)
    >>> scanlib.enable()
    >>> [loop.op for loop in scanlib.explain(y).loops]
    ['ElemwiseScan']
    >>> scanlib.disable()
    >>> [loop.op for loop in scanlib.explain(y).loops]
    ['pytensor.scan']
    """
    config.scanlib__adopt = True


def disable() -> None:
    """Leave loops built with `pytensor.scan` to PyTensor, as they are by default.

    Those in steps of scanlib's loops, and those whose steps run such loops, as Jacobians do, are
    adopted always.

    See Also
    --------
    enable : The opposite.

    Examples
    --------
    >>> import pytensor, scanlib
    >>> scanlib.enable()
    >>> scanlib.disable()
    >>> pytensor.config.scanlib__adopt
    False
    """
    config.scanlib__adopt = False


@contextmanager
def enabled(on: bool = True) -> Iterator[None]:
    """Compile loops of `pytensor.scan` as scanlib's inside a ``with`` block.

    Parameters
    ----------
    on : bool, optional
        False leaves them to PyTensor inside the block, where adoption is switched on around it.

    Examples
    --------
    >>> import pytensor, pytensor.tensor as pt, scanlib
    >>> x = pt.dvector("x")
    >>> y = pytensor.scan(lambda x, y: 0.5 * y + x, x, pt.zeros(()), return_updates=False)
    >>> with scanlib.enabled():
    ...     f = pytensor.function([x], y)
    >>> f([1.0, 1.0, 1.0])
    array([1.  , 1.5 , 1.75])
    """
    with config.change_flags(scanlib__adopt=on):
        yield
