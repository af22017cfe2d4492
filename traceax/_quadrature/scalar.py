"""Scalar functions: what users give as `fn`, and what the derivative rule makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Inexact, PyTree, Shaped

from traceax._core.canonical import canonical
from traceax._core.operator import LinearMap, Structure

Scalar = Inexact[Array, ""]
Vector = Inexact[Array, " p"]
Flat = Callable[[Scalar], Inexact[Array, " p"]]


class ScalarFunction(eqx.Module):
    """x -> the p values of a function's pytree, in one vector; x a scalar, or, for a
    combination of traces, all of these in one vector too.

    Whatever the function closes over has become a leaf, so it can be differentiated.
    """

    function: Callable[[Any], PyTree[Array]]
    point: jax.ShapeDtypeStruct | None = eqx.field(static=True, default=None)

    def __call__(self, x: Scalar | Vector) -> Inexact[Array, " p"]:
        leaves = [jnp.ravel(leaf) for leaf in jax.tree.leaves(self.function(x))]
        with jax.numpy_dtype_promotion("standard"):
            common = jnp.result_type(jnp.real(x).dtype, *leaves)
        return jnp.concatenate([leaf.astype(common) for leaf in leaves])


def scalar_function(
    name: str, fn: Callable[[Scalar], PyTree[Array]], dtype: jnp.dtype
) -> tuple[ScalarFunction, Structure]:
    """`fn` with what it closes over as leaves, and the structure of its result."""
    if not callable(fn):
        raise TypeError(
            f"traceax.{name}(fn=...) must be a function of a scalar, because it is "
            f"evaluated at eigenvalues, but got {type(fn).__name__}. Pass jax.numpy.log, "
            "say, or a function of your own."
        )
    point = jax.ShapeDtypeStruct((), dtype)
    result = eqx.filter_eval_shape(fn, point)
    leaves = jax.tree.leaves(result)
    if not leaves or not all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise TypeError(
            f"traceax.{name}(fn=...) must return an array, or a pytree of arrays, because "
            f"that is what is traced, but it returned {result!r}. Leave out the rest."
        )
    return ScalarFunction(canonical(fn, point), point), inexact(result, dtype)


def inexact(structure: Structure, dtype: jnp.dtype) -> Structure:
    """What becomes of results: integers become numbers of `dtype`, or its real part's."""

    def described(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        is_inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
        kind = leaf.dtype if is_inexact else jnp.finfo(dtype).dtype
        return jax.ShapeDtypeStruct(leaf.shape, kind)

    return jax.tree.map(described, structure)


class MatrixFunction(eqx.Module):
    """f(A), of which traces are estimated, and what is made of these: a subject of the
    rule."""

    linear_map: LinearMap
    fn: Flat
    combine: ScalarFunction | None = None


class Jacobian(eqx.Module):
    """x -> the derivatives of fn(x) in every number that `fn` holds and that `tangent`
    moves, p x q of them in one vector.

    The rule applies this to the tangent, `directional`, rather than take the derivative in
    its direction at once: whatever has a derivative rule of its own must not see tangents,
    or JAX drops that rule where it transposes.
    """

    fn: Flat
    moved: PyTree[bool] = eqx.field(static=True)

    def __call__(self, x: Scalar) -> Inexact[Array, " p*q"]:
        numbers, rest = eqx.partition(self.fn, self.moved)

        def value(numbers: PyTree) -> Inexact[Array, " p"]:
            return eqx.combine(numbers, rest)(x)

        vector, restore = ravel_pytree(_split_complex(numbers))
        # Forwards, for then values may be complex, too.
        jacobian = jax.jacfwd(lambda v: value(_join_complex(restore(v), numbers)))
        return jnp.ravel(jacobian(vector))


def moving(fn: Flat, tangent: Any) -> tuple[Jacobian, Inexact[Array, " q"]]:
    """The Jacobian of `fn` in what `tangent` moves, and the tangent as a vector."""
    moved = jax.tree.map(lambda t: t is not None, tangent, is_leaf=lambda t: t is None)
    flat, _ = ravel_pytree(_split_complex(eqx.filter(tangent, moved)))
    return Jacobian(fn, moved), flat


def _split_complex(tree: PyTree[Array]) -> PyTree[Array]:
    def split(leaf: Array) -> Array:
        return jnp.stack([leaf.real, leaf.imag]) if jnp.iscomplexobj(leaf) else leaf

    return jax.tree.map(split, tree)


def _join_complex(tree: PyTree[Array], like: PyTree[Array]) -> PyTree[Array]:
    def join(leaf: Array, old: Array) -> Array:
        return jax.lax.complex(*leaf) if jnp.iscomplexobj(old) else leaf

    return jax.tree.map(join, tree, like)


class Slope(eqx.Module):
    """x -> f'(x)."""

    fn: Flat

    def __call__(self, x: Scalar) -> Inexact[Array, " p"]:
        return jax.jvp(self.fn, (x,), (jnp.ones_like(x),))[1]


class Factor(eqx.Module):
    """g1 or g2 of f' = g1 g2, with |g1| <= g2 = (f'^2 + c^2)^(1/4), c the `softening`.

    c = 0 where f' has one sign: then g2 = |f'|^(1/2), the best there is. Where it changes
    sign, that root has a cusp, which polynomials approach slowly; c rounds it off.
    """

    fn: Flat
    softening: Float[Array, " p"]
    first: bool = eqx.field(static=True)

    def __call__(self, x: Scalar) -> Inexact[Array, " p"]:
        slope = Slope(self.fn)(x)
        zero = slope == 0
        size = jnp.where(zero, 0, jnp.abs(jnp.where(zero, 1, slope)))
        large = jnp.maximum(size, self.softening)
        small = jnp.minimum(size, self.softening)
        empty = large == 0
        large = jnp.where(empty, 1, large)
        root = jnp.sqrt(large) * (1 + (small / large) ** 2) ** 0.25
        if self.first:
            # Of the adjoint, since it stands on the left.
            return jnp.where(empty, 0, slope.conj() / root)
        return jnp.where(empty, 0, root).astype(slope.dtype)


def softening(fn: Flat, nodes: Shaped[Array, ...]) -> Float[Array, " p"]:
    """A tenth of the largest |f'| at the nodes for values whose f' changes sign there. The
    nodes of each start have their own: what else is sampled changes nothing."""
    slopes = jax.vmap(Slope(fn))(jnp.ravel(nodes))
    largest = jnp.max(jnp.abs(slopes), axis=0)
    if jnp.iscomplexobj(slopes):
        return largest / 10
    changes = (jnp.min(slopes, axis=0) < 0) & (jnp.max(slopes, axis=0) > 0)
    return jnp.where(changes, largest / 10, 0)
