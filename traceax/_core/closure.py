"""Functions that users give, with what they refer to made a part of them.

A tracer that a function refers to must become a leaf of a pytree, or no derivative rule can
see it: in a static field it is a leak, or a constant. `eqx.filter_closure_convert` does it
for what a function closes over. It returns a function without closure as it is, though its
default arguments may hold just the same: `lambda v, K=K: K @ v`.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

_CONSTANTS = (bool, int, float, complex, str, bytes)


def closed(fn: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """`fn`, to be called with what `args` are like."""
    if has_defaults(fn):
        return eqx.filter_closure_convert(lambda *xs: fn(*xs), *args)
    return eqx.filter_closure_convert(fn, *args)


def has_defaults(fn: Callable[..., Any]) -> bool:
    """Whether it would pass for one that refers to nothing, and has default arguments that
    may hold arrays. (A function that does not is left as it is: it stays equal to itself,
    so that what is compiled for it serves again.)"""
    fn = getattr(fn, "fn", fn)  # what Equinox has "converted" already
    if not isinstance(fn, types.FunctionType) or fn.__closure__:
        return False
    defaults = jax.tree.leaves((fn.__defaults__, fn.__kwdefaults__))
    return not all(isinstance(leaf, _CONSTANTS) for leaf in defaults)
