"""The budget of estimators that deflate, and the Krylov space that they deflate by."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, Inexact, PRNGKeyArray

from traceax._probes.draw import draw
from traceax._probes.samplers import sphere


class Split(NamedTuple):
    """`depth` blocks of `width` for the Krylov space, then probes, each with steps."""

    width: int
    depth: int
    num_probes: int
    num_steps: int

    @property
    def num_matvecs(self) -> int:
        return self.width * self.depth + self.num_probes * self.num_steps


def split(num_matvecs: int, n: int, share: float) -> Split:
    """A `share` of the budget for the space, the rest for the probes.

    A deep space of narrow blocks finds eigenvalues far better than one wide block, but
    only as many copies of each as it is wide: measured, 30 blocks and more are as good as
    any. Steps and probes grow together, the steps ahead, because quadrature errors are
    biases.
    """
    sketch = int(share * num_matvecs)
    width = max(1, math.isqrt(num_matvecs) // 2, num_matvecs // 30)
    width = min(width, max(sketch // 6, 1))
    depth = max(sketch // width, 2)
    rest = num_matvecs - width * depth
    num_steps = min(n, max(2, math.isqrt(3 * rest // 2)))
    return Split(width, depth, max(rest // num_steps, 1), num_steps)


def draw_for(
    name: str, split: Split, key: PRNGKeyArray, operator: lx.AbstractLinearOperator
) -> tuple[Inexact[Array, "n b"], Inexact[Array, "n k"]]:
    """The block that starts the space, and the probes."""
    block = draw(name, sphere, key, operator, split.width + split.num_probes)
    return block[:, : split.width], block[:, split.width :]


def resphering(
    remainder: Inexact[Array, "N n"], rank: Float[Array, ""]
) -> Float[Array, " N"]:
    """The squared length that isotropic vectors of a space of dimension `rank` should
    have, over the one that they have."""
    squares = jnp.sum((remainder * remainder.conj()).real, axis=1)
    return jnp.where(squares > 0, rank / jnp.where(squares > 0, squares, 1), 0)
