"""The functions that users give: `fn` of a scalar, and `combine` of several traces.

**Combinations.** Let t be the mean of samples s_i, each a vector of all p traces, and g the
combination. To first order, g(t) - E[g] is the mean of Dg(t) (s_i - E[s_i]). So the error
of g(t) is that of one trace, with the samples Dg(t) s_i: those of the function Dg(t) f,
whose quadrature and rounding errors it has, too. This includes covariances: the errors that
numerator and denominator of a thermal mean share, most of their errors, cancel.

To second order g(t) is biased by half of tr(D^2 g(t) Cov t). The jackknife removes this
bias with the means of all samples but one, t_{-i} = t - d_i, d_i = (s_i - t)/(k - 1):

    value = g(t) + (k - 1) mean of (g(t) - g(t - d_i)).

Samples that share probes vary less than their mean does. Of their bias this removes at
least a half, and at most all. Derivatives take the d_i as constants: in the parameters of
`combine` they are those of the value; all others move t by the split rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.tree_util import Partial
from jaxtyping import Array, Float, Inexact, PyTree, Shaped

from traceax._core.canonical import canonical
from traceax._core.checks import check_callable, check_returned, invalid
from traceax._core.operator import LinearMap
from traceax._core.rule import Outcome, Readout
from traceax._core.vectors import Structure, as_result, flatten
from traceax._linalg.columns import dot, mean, over, promoted

Scalar = Inexact[Array, ""]
Flat = Callable[[Scalar], Inexact[Array, " p"]]

# With fewer samples the jackknife does not estimate the bias.
FEWEST = 3


class ScalarFunction(eqx.Module):
    """x -> the p values of a function's pytree, in one vector. x is a scalar, or the vector
    of all traces if the function is a combination. The arrays that the function closes over
    are leaves, so that it can be differentiated in them."""

    function: Callable[[Any], PyTree[Array]]
    point: jax.ShapeDtypeStruct | None = eqx.field(static=True, default=None)

    def __call__(self, x: Inexact[Array, "*t"]) -> Inexact[Array, " p"]:
        leaves = list(promoted(jnp.real(x), *jax.tree.leaves(self.function(x)))[1:])
        return flatten(leaves, leaves[0].dtype)


def scalar_function(
    name: str, fn: Callable[[Scalar], PyTree[Array]], dtype: jnp.dtype
) -> tuple[ScalarFunction, Structure]:
    """`fn` as a `ScalarFunction`, and the structure of its result."""
    form = "of a scalar, because it is evaluated at eigenvalues"
    cure = "Pass jax.numpy.log, say, or a function of your own."
    check_callable(name, "fn", fn, form, cure)
    point = jax.ShapeDtypeStruct((), dtype)
    result = eqx.filter_eval_shape(fn, point)
    leaves = jax.tree.leaves(result)
    if not leaves or not all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        must = "return an array, or a pytree of arrays, because that is what is traced"
        raise invalid(TypeError, name, "fn", must, repr(result), "Leave out the rest.")
    return ScalarFunction(canonical(fn, point), point), _inexact(result, dtype)


def _inexact(structure: Structure, dtype: jnp.dtype) -> Structure:
    """Integers in results become real numbers of the precision of `dtype`."""

    def inexact(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        is_inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
        kind = leaf.dtype if is_inexact else jnp.finfo(dtype).dtype
        return jax.ShapeDtypeStruct(leaf.shape, kind)

    return jax.tree.map(inexact, structure)


class MatrixFunction(eqx.Module):
    """The subject of the derivative rule: the operator and the function of f(A), the
    combination of its traces, and a lower bound of the spectrum if one is known."""

    linear_map: LinearMap
    fn: Flat
    combine: ScalarFunction | None = None
    bound: Float[Array, ""] | None = None


class Jacobian(eqx.Module):
    """x -> the p x q derivatives of fn in q numbers that have a tangent, in one vector.

    The derivative rule multiplies this by the tangent, and never differentiates in the
    direction of the tangent. For if a function with its own derivative rule saw tangents,
    JAX would drop that rule when it transposes.
    """

    fn: Flat
    moved: PyTree[bool] = eqx.field(static=True)

    def __call__(self, x: Scalar) -> Inexact[Array, " pq"]:
        numbers, rest = eqx.partition(self.fn, self.moved)
        vector, restore = ravel_pytree(_as_real(numbers))

        def join(old: Array, new: Any) -> Array:
            return jax.lax.complex(*new) if jnp.iscomplexobj(old) else new

        def value(vector: Float[Array, " q"]) -> Inexact[Array, " p"]:
            moved = jax.tree.map(join, numbers, restore(vector))
            return eqx.combine(moved, rest)(x)

        # In forward mode the values may be complex.
        return jnp.ravel(jax.jacfwd(value)(vector))


def jacobian_and_tangent(fn: Flat, tangent: Any) -> tuple[Jacobian, Inexact[Array, " q"]]:
    """The Jacobian of `fn` in all that has a tangent, and the tangent as a vector."""
    moved = jax.tree.map(lambda t: t is not None, tangent, is_leaf=lambda t: t is None)
    return Jacobian(fn, moved), ravel_pytree(_as_real(eqx.filter(tangent, moved)))[0]


def _as_real(tree: PyTree[Array]) -> PyTree[Array]:
    def parts(x: Array) -> Any:
        return (x.real, x.imag) if jnp.iscomplexobj(x) else x

    return jax.tree.map(parts, tree)


class Slope(eqx.Module):
    """x -> f'(x)."""

    fn: Flat

    def __call__(self, x: Scalar) -> Inexact[Array, " p"]:
        return jax.jvp(self.fn, (x,), (jnp.ones_like(x),))[1]


class Factor(eqx.Module):
    """g1 or g2 of f' = g1 g2, with |g1| <= g2 = (f'^2 + c^2)^(1/4), c the `softening`.

    c = 0 where f' has one sign: then g2 = |f'|^(1/2), which is optimal. Where f' changes
    its sign, that root has a cusp, which polynomials approximate slowly; c smooths it.
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
            # The conjugate, because g1(A) v is the left vector.
            return jnp.where(empty, 0, over(slope.conj(), root))
        return jnp.where(empty, 0, root).astype(slope.dtype)


def softening(fn: Flat, nodes: Shaped[Array, "..."]) -> Float[Array, " p"]:
    """A tenth of the largest |f'| at the nodes if f' changes its sign there, else 0. The
    nodes are those of one start, so that it does not depend on other samples. A slope of
    rounding, at a node where f is largest, say, has no sign."""
    slopes = jax.vmap(Slope(fn))(jnp.ravel(nodes))
    largest = jnp.max(jnp.abs(slopes), axis=0)
    if jnp.iscomplexobj(slopes):
        return largest / 10
    noise = largest * float(jnp.finfo(slopes.dtype).eps) ** 0.5
    changes = (jnp.min(slopes, axis=0) < -noise) & (jnp.max(slopes, axis=0) > noise)
    return jnp.where(changes, largest / 10, 0)


def combination(
    name: str,
    combine: Callable[[Any], PyTree[Array]] | None,
    fn: ScalarFunction,
    structure: Structure,
) -> tuple[ScalarFunction | None, Structure]:
    """`combine` as a function of the vector of all traces of `fn`, which have this
    `structure`, and the structure of its result."""
    if combine is None:
        return None, structure
    cure = "Pass a function of what fn returns, lambda t: t['a'] / t['b'], say."
    check_callable(name, "combine", combine, "of the traces", cure)
    traces = eqx.filter_eval_shape(fn, fn.point)

    def of_vector(t: Inexact[Array, " p"]) -> Any:
        return combine(as_result(t, structure))

    result = eqx.filter_eval_shape(of_vector, traces)
    check_returned(name, "combine", result, "numbers")
    function = ScalarFunction(canonical(of_vector, traces), traces)
    return function, _inexact(result, traces.dtype)


class Traces(NamedTuple):
    """All traces of a run: their mean, the samples, the values of f that the standard error
    is computed from, bounds of such values, and the readout of the traces."""

    total: Inexact[Array, " p"]
    samples: Inexact[Array, "p k"]
    values: Inexact[Array, "levels p m"]
    bounds: tuple[Float[Array, "p m"], ...]
    readout: Readout


def traces_outcome(
    combine: ScalarFunction | None,
    traces: Traces,
    error_of: Callable[..., Float[Array, " p"]],
    eps: float,
) -> Outcome:
    """The traces, or their combination: `error_of` the values and bounds of any function is
    the standard error of its trace."""
    total, samples, values, bounds, readout = traces
    if combine is None:
        return Outcome(total, _known(error_of(values, *bounds), total), readout)
    slope = _slope(combine, total)
    copies = slope.shape[1] // len(total)  # two if the traces are complex
    bounds = (_through(jnp.abs(slope), jnp.tile(x, (copies, 1))) for x in bounds)
    error = error_of(_through(slope, values), *bounds)
    shifts = _shifts(combine, total, samples)
    plain, value = combine(total), _unbiased(combine, total, shifts)
    error = jnp.hypot(jnp.hypot(error, 4 * eps * jnp.abs(value)), jnp.abs(value - plain))
    return Outcome(value, _known(error, value), Partial(_read, readout, shifts))


def _known(error: Float[Array, " p"], value: Inexact[Array, " p"]) -> Float[Array, " p"]:
    """Infinite where f, or a slope, is infinite, but the value is not NaN."""
    return jnp.where(jnp.isnan(error) & ~jnp.isnan(value), jnp.inf, error)


def exact_outcome(
    combine: ScalarFunction | None, total: Inexact[Array, " p"], readout: Readout
) -> Outcome:
    """The same for traces that are exact."""
    value = total
    if combine is not None:
        readout, value = Partial(_read, readout, None), combine(total)
    return Outcome(value, jnp.zeros_like(value.real), readout)


def _read(
    traces: Readout, shifts: Inexact[Array, "p k"] | None, subject: MatrixFunction
) -> Inexact[Array, " q"]:
    assert subject.combine is not None
    return _unbiased(subject.combine, traces(subject), shifts)


def _slope(combine: ScalarFunction, total: Inexact[Array, " p"]) -> Inexact[Array, "q _"]:
    """Dg(t). For complex t the derivatives in real parts, then those in imaginary ones."""

    def along(direction: Inexact[Array, " p"]) -> Inexact[Array, " q"]:
        return jax.jvp(combine, (total,), (direction,))[1]

    units = jnp.eye(total.size, dtype=total.dtype)
    if jnp.iscomplexobj(total):
        units = jnp.concatenate([units, 1j * units])
    return jax.vmap(along, out_axes=1)(units)


def _through(
    slope: Inexact[Array, "q _"], values: Inexact[Array, "*levels p m"]
) -> Inexact[Array, "*levels q m"]:
    """Dg(t) f. Traces that g does not depend on may be undefined."""
    parts = [values.real, values.imag] if jnp.iscomplexobj(values) else [values]
    x = jnp.concatenate(parts, axis=-2)
    finite = jnp.isfinite(x)
    image = dot(slope, jnp.where(finite, x, 0).astype(slope.dtype))
    undefined = dot((slope != 0).astype(x.dtype), (~finite).astype(x.dtype))
    return jnp.where(undefined > 0, jnp.nan, image)


def _unbiased(
    combine: ScalarFunction,
    total: Inexact[Array, " p"],
    shifts: Inexact[Array, "p k"] | None,
) -> Inexact[Array, " q"]:
    """The value above, d_i the `shifts`."""
    value = combine(total)
    if shifts is None:
        return value
    others = jax.vmap(combine, in_axes=1, out_axes=1)(total[:, None] - shifts)
    return value + (shifts.shape[1] - 1) * mean(value[:, None] - others)


def _shifts(
    combine: ScalarFunction, total: Inexact[Array, " p"], samples: Inexact[Array, "p k"]
) -> Inexact[Array, "p k"] | None:
    """The d_i, if there are enough samples. They are zero if g is undefined at some t_{-i},
    as the log of a negative number is: then the bias is unknown."""
    k = samples.shape[1]
    if k < FEWEST:
        return None
    shifts = (samples - total[:, None]) / (k - 1)
    value, unbiased = combine(total), _unbiased(combine, total, shifts)
    undefined = jnp.any(jnp.isfinite(value) & ~jnp.isfinite(unbiased))
    return jnp.where(undefined, 0, shifts)
