"""What is read at the nodes of a quadrature: rates of change, and means without a bias."""

import jax.numpy as jnp
import numpy as np

from tests.helpers import close
from traceax._quadrature.nodes import slopes_at
from traceax._quadrature.scalar import ScalarFunction, _unbiased


def test_rates_are_derivatives_or_secants() -> None:
    """The smaller one, over a step; the secant where the derivative is infinite."""
    nodes, step = jnp.array([0.0, 1.0, 4.0]), jnp.full(1, 0.01)
    got = slopes_at(lambda x: jnp.stack([jnp.sqrt(x), x**2, -(x**2)]), nodes, step)
    root = [10.0, (1.01**0.5 - 1) / 0.01, (4.01**0.5 - 2) / 0.01]
    close(got, np.stack([root, [0, 2, 8], [0, 2, 8]], axis=1), 1e-12)
    # Without a step the change itself, which is zero.
    assert not jnp.any(slopes_at(lambda x: x[None] ** 2, nodes, jnp.zeros(1)))


def test_the_jackknife_removes_a_bias() -> None:
    """It is that of g(t) and the g(t - d_i), also where they are not symmetric."""
    total, shifts = jnp.array([2.0]), jnp.array([[0.3, -0.5, 0.4, -0.2]])
    cube = ScalarFunction(lambda t: t**3)
    want = 8 + 3 * np.mean(8 - (2 - np.asarray(shifts)) ** 3)
    close(_unbiased(cube, total, shifts), [want], 1e-12)
    close(_unbiased(cube, total, None), [8.0], 1e-15)
