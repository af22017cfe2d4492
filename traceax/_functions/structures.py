"""Log-determinants that split, because of what is known of the operator's structure:

    log det(c A) = n log |c| + log det(+-A),
    log det(A_1 (+) A_2 (+) ... + s I) = sum of log det(A_i + s I),
    log det(A_1 (x) A_2 (x) ...) = sum of (n / n_i) log det A_i.

lineax knows scaled operators. Blocks and factors are known of a class of the user's that
has an attribute `diagonal_blocks` or `kronecker_factors`, a sequence of operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import lineax as lx

from traceax._core.checks import Shift, check_operator, require
from traceax._core.estimate import Estimate
from traceax._core.keys import BLOCKS, keys_of
from traceax._core.operator import Operator, is_negative, is_semidefinite, untagged
from traceax._estimators.call import Call
from traceax._functions.arguments import real_dtype
from traceax._linalg.columns import Number


class Split(NamedTuple):
    """log det(A + shift I), less `rest`, as the sum of the log-determinants of operators,
    each with its weight."""

    rest: Number | float
    operators: Sequence[Operator]
    weights: Sequence[int]

    def joined(self, call: Call, estimate: Callable[..., Estimate]) -> Estimate:
        """Return the sum. `estimate(operator, key)` is of one log-determinant, each from as
        many matvecs as one of the whole operator would take."""
        several = len(self.operators) > 1
        keys = keys_of(call.key, len(self.operators), BLOCKS) if several else [call.key]
        found = [estimate(*both) for both in zip(self.operators, keys, strict=True)]
        pairs = list(zip(found, self.weights, strict=True))
        value = self.rest + sum(weight * part.value for part, weight in pairs)
        # The parts of different operators have different keys, but all may be unresolved.
        gap = sum(weight * part.quadrature_error for part, weight in pairs)
        squares = [part.standard_error**2 - part.quadrature_error**2 for part in found]
        noise = sum(
            w**2 * jnp.maximum(x, 0) for w, x in zip(self.weights, squares, strict=True)
        )
        spent = max(part.num_matvecs for part in found)
        degrees = min(part.degrees_of_freedom for part in found)
        inexact = [part.method for part in found if part.method != "exact"]
        method, error = (*inexact, "exact")[0], jnp.sqrt(noise + gap**2)
        return Estimate(value, error, spent, degrees, method=method, quadrature_error=gap)


def split(name: str, operator: Operator, shift: Shift) -> Split | None:
    """Return how log det(A + shift I) splits, or None if nothing is known."""
    bare, is_shifted = (
        untagged(operator),
        not (isinstance(shift, int | float) and not shift),
    )
    if isinstance(bare, lx.MulLinearOperator | lx.DivLinearOperator) and not is_shifted:
        inner, sign = bare.operator, -1 if is_negative(bare.operator) else 1
        if is_semidefinite(inner):
            size = sign * jnp.asarray(bare.scalar, real_dtype(operator))
            power = -1 if isinstance(bare, lx.DivLinearOperator) else 1
            rest = power * operator.in_size() * jnp.log(size)
            return Split(rest, [inner if sign > 0 else -inner], [1])
    n, blocks = operator.in_size(), getattr(bare, "diagonal_blocks", None)
    if blocks is not None and not isinstance(shift, lx.DiagonalLinearOperator):
        sizes = _sizes(name, "diagonal_blocks", blocks)
        _check(name, "diagonal_blocks", "add up to", sum(sizes), n)
        return Split(0.0, blocks, [1] * len(blocks))
    factors = getattr(bare, "kronecker_factors", None)
    if factors is not None and not is_shifted:
        sizes = _sizes(name, "kronecker_factors", factors)
        _check(name, "kronecker_factors", "multiply to", math.prod(sizes), n)
        return Split(0.0, factors, [n // size for size in sizes])
    return None


def _sizes(name: str, attribute: str, operators: Sequence[Operator]) -> list[int]:
    """Check the operators that a user's class names, and return their dimensions."""
    argument = f"operator.{attribute}"
    return [check_operator(name, op, argument=argument).in_size() for op in operators]


def _check(name: str, attribute: str, verb: str, got: int, n: int) -> None:
    must = f"have dimensions that {verb} {n}, that of the operator"
    require(got == n, name, f"operator.{attribute}", must, got, "Name all of them, once.")
