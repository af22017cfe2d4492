"""The functions that users give: `fn` of a scalar, and `combine` of several traces.

**Combinations.** Let t be the mean of samples s_i, each of which is a vector of all p
traces, and let g be the combination. To first order, g(t) - E[g] is the mean of
Dg(t) (s_i - E[s_i]). So the error of g(t) is the error of one trace, which has the samples
Dg(t) s_i. It is the trace of the function Dg(t) f, and has the quadrature and rounding
errors of that function. This includes covariances: most of the errors of a thermal mean are
shared by its numerator and its denominator, and cancel.

To second order g(t) has a bias of half of tr(D^2 g(t) Cov t). The jackknife removes this
bias by the means of all samples but one, t_{-i} = t - d_i, d_i = (s_i - t)/(k - 1):

    value = g(t) + (k - 1) mean of (g(t) - g(t - d_i)).

Samples that share probes vary less than their mean does. The jackknife then removes at
least a half of their bias, and at most all of it. Derivatives take the d_i as constants. So
the derivative in the parameters of `combine` is that of the value. Everything else changes
t, whose derivative dt is given by the split rule, and the derivative is Dg(t) dt. (That of
the corrected value would be free of the bias that Dg has because t varies, but not of the
covariance of t and dt. For logarithms and ratios these two nearly cancel.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jax.flatten_util import ravel_pytree
from jax.tree_util import Partial
from jaxtyping import Array, Float, Inexact, PyTree, Shaped

from traceax._core.canonical import canonical
from traceax._core.checks import check_callable, check_returned, invalid
from traceax._core.operator import LinearMap
from traceax._core.rule import Outcome, Readout, Values
from traceax._core.vectors import Structure, as_result, flatten
from traceax._linalg.columns import dot, mean, over, promoted

Scalar = Inexact[Array, ""]
Total = Inexact[Array, " p"]
Samples = Inexact[Array, "p k"]
Flat = Callable[[Scalar], Total]

# The jackknife needs so many samples to estimate the bias.
FEWEST_SAMPLES = 3


class ScalarFunction(eqx.Module):
    """A function whose pytree of p values becomes one vector. Its argument x is a scalar,
    or the vector of all traces if the function is a combination. The arrays that the
    function closes over are leaves, so that it can be differentiated in them."""

    function: Callable[[Any], PyTree[Array]]
    point: jax.ShapeDtypeStruct | None = eqx.field(static=True, default=None)

    def __call__(self, x: Inexact[Array, "*t"]) -> Inexact[Array, " p"]:
        leaves = list(promoted(jnp.real(x), *jax.tree.leaves(self.function(x)))[1:])
        return flatten(leaves, leaves[0].dtype)


def scalar_function(
    name: str, fn: Callable[[Scalar], PyTree[Array]], dtype: jnp.dtype
) -> tuple[ScalarFunction, Structure]:
    """Return `fn` as a `ScalarFunction`, and the structure of its result."""
    form = "of a scalar, because it is evaluated at eigenvalues"
    cure = "Pass jax.numpy.log or your own function."
    check_callable(name, "fn", fn, form, cure)
    point = jax.ShapeDtypeStruct((), dtype)
    result = eqx.filter_eval_shape(fn, point)
    leaves = jax.tree.leaves(result)
    if not leaves or not all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        must = "return an array, or a pytree of arrays, because that is what is traced"
        raise invalid(TypeError, name, "fn", must, repr(result), "Leave out the rest.")
    return ScalarFunction(canonical(fn, point), point), _inexact(result, dtype)


def _inexact(structure: Structure, dtype: jnp.dtype) -> Structure:
    """Replace integers in a result by real numbers of the precision of `dtype`."""

    def inexact(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        is_inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
        kind = leaf.dtype if is_inexact else jnp.finfo(dtype).dtype
        return jax.ShapeDtypeStruct(leaf.shape, kind)

    return jax.tree.map(inexact, structure)


class MatrixFunction(eqx.Module):
    """The subject of the derivative rule: the operator A, the function f, the combination
    of the traces of f(A), and a lower bound of the spectrum if one is known. The `node` is
    a bound at which f is defined, an upper one if the operator is tagged negative
    semidefinite. The spectrum lies on one `side` of it: 1 is above, -1 below. With a node,
    values and slopes are those of the mixture of Gauss's rule and Radau's."""

    linear_map: LinearMap
    fn: Flat
    combine: ScalarFunction | None = None
    bound: Float[Array, ""] | None = None
    node: Float[Array, ""] | None = None
    side: int = eqx.field(static=True, default=1)

    @property
    def at_rest(self) -> MatrixFunction:
        """The same function of the identity, for what depends on the space of A alone."""
        space = lx.IdentityLinearOperator(self.linear_map.operator.in_structure())
        return replace(self, linear_map=LinearMap(space))

    def along(self, tangent: Any) -> MatrixFunction:
        """Return the function that is differentiated along this tangent of the map."""
        return self


class Jacobian(eqx.Module):
    """A function of x, whose values are the p x q derivatives of fn in all q numbers that
    have a tangent, as one vector.

    The derivative rule multiplies this by the tangent, and never differentiates in the
    direction of the tangent. If a function with its own derivative rule saw tangents, JAX
    would drop that rule when it transposes.
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
    """Return the Jacobian of `fn` in all that has a tangent; and the tangent, a vector."""
    moved = jax.tree.map(lambda t: t is not None, tangent, is_leaf=lambda t: t is None)
    return Jacobian(fn, moved), ravel_pytree(_as_real(eqx.filter(tangent, moved)))[0]


def _as_real(tree: PyTree[Array]) -> PyTree[Array]:
    """Replace complex arrays by pairs of their real and imaginary parts."""

    def parts(x: Array) -> Any:
        return (x.real, x.imag) if jnp.iscomplexobj(x) else x

    return jax.tree.map(parts, tree)


class Slope(eqx.Module):
    """The derivative f'(x) as a function of x."""

    fn: Flat

    def __call__(self, x: Scalar) -> Inexact[Array, " p"]:
        return jax.jvp(self.fn, (x,), (jnp.ones_like(x),))[1]


class Factors(eqx.Module):
    """The factors of f' = g1 g2 as a function of x, all p values of conj(g1) before those
    of g2. (The conjugate, because g1(A) v is the left vector of the split rule.)

    They have |g1| <= g2 = (f'^2 + c^2)^(1/4), where c is the `softening`. It is 0 if f' has
    one sign, which makes g2 = |f'|^(1/2), the optimal choice. If f' changes its sign, that
    root has a cusp, which polynomials approximate slowly, and c smooths it.
    """

    fn: Flat
    softening: Float[Array, " p"]

    def __call__(self, x: Scalar) -> Inexact[Array, " pp"]:
        slope = Slope(self.fn)(x)
        is_zero = slope == 0
        size = jnp.where(is_zero, 0, jnp.abs(jnp.where(is_zero, 1, slope)))
        large = jnp.maximum(size, self.softening)
        small = jnp.minimum(size, self.softening)
        is_empty = large == 0
        large = jnp.where(is_empty, 1, large)
        root = jnp.sqrt(large) * (1 + (small / large) ** 2) ** 0.25
        factors = jnp.stack([over(slope.conj(), root), root.astype(slope.dtype)])
        return jnp.where(is_empty, 0, factors).ravel()


def softening(fn: Flat, nodes: Shaped[Array, "..."]) -> Float[Array, " p"]:
    """Return a tenth of the largest |f'| at the nodes if f' changes its sign there, else 0.

    The nodes are those of one start, so that the result does not depend on other samples. A
    slope at the level of rounding, for example at a maximum of f, has no sign."""
    slopes = jax.vmap(Slope(fn))(jnp.ravel(nodes))
    largest = jnp.max(jnp.abs(slopes), axis=0)
    if jnp.iscomplexobj(slopes):
        return largest / 10
    noise = largest * float(jnp.finfo(slopes.dtype).eps) ** 0.5
    changes = (jnp.min(slopes, axis=0) < -noise) & (jnp.max(slopes, axis=0) > noise)
    return jnp.where(changes, largest / 10, 0)


def combination(
    name: str, combine: Callable | None, fn: ScalarFunction, structure: Structure
) -> tuple[ScalarFunction | None, Structure]:
    """Return `combine` as a function of the vector of all traces of `fn`, which have this
    `structure`; and the structure of its result."""
    if combine is None:
        return None, structure
    cure = "Pass a function of what fn returns, lambda t: t['a'] / t['b'], for example."
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

    total: Total
    samples: Samples
    values: Inexact[Array, "levels rules p m"]
    bounds: tuple[Float[Array, "p m"], ...]
    readout: Readout


def traces_outcome(
    subject: MatrixFunction, traces: Traces, error_of: Callable[..., tuple[Array, Array]]
) -> Outcome:
    """Return the traces or their combination, with its error bar and its readout.
    `error_of(values, *bounds)` returns the error of sampling and rounding, and the error of
    quadrature, of the trace of any function that has these values and bounds."""
    total, samples, values, bounds, readout = traces
    if (combine := subject.combine) is None:
        value, (error, gap) = total, error_of(values, *bounds)
    else:
        slope = _slope_of(combine, total)
        copies = slope.shape[1] // len(total)  # two if the traces are complex
        bounds = (_through(jnp.abs(slope), jnp.tile(x, (copies, 1))) for x in bounds)
        error, gap = error_of(_through(slope, _real_parts(values, axis=-2)), *bounds)
        shifts = _shifts(combine, total, samples)
        readout = Partial(read_combination, readout, shifts)
        value = _unbiased(combine, total, shifts)
        eps = float(jnp.finfo(subject.linear_map.dtype).eps)
        error = jnp.hypot(error, 4 * eps * jnp.abs(value))
        error = jnp.hypot(error, jnp.abs(value - combine(total)))
    # An error is NaN if f or a slope is infinite, but then the value may be known.
    error, gap = (
        jnp.where(jnp.isnan(part) & ~jnp.isnan(value), jnp.inf, part)
        for part in (jnp.hypot(error, gap), gap)
    )
    return Outcome(value, error, readout, quadrature_error=gap)


def read_combination(
    traces: Readout, shifts: Samples | None, subject: MatrixFunction
) -> Inexact[Array, " q"]:
    """Read the combination of the traces of another operator or another function."""
    assert subject.combine is not None
    return _unbiased(subject.combine, traces(subject), shifts)


def _real_parts(values: Inexact[Array, "..."], axis: int) -> Float[Array, "..."]:
    """Return the real parts, and after them the imaginary parts of complex values."""
    parts = [values.real, values.imag] if jnp.iscomplexobj(values) else [values]
    return jnp.concatenate(parts, axis=axis)


def _slope_of(combine: ScalarFunction, total: Total) -> Inexact[Array, "q _"]:
    """Return Dg(t), the derivatives in the real parts of t."""

    def of_parts(parts: Float[Array, " _"]) -> Inexact[Array, " q"]:
        t = jax.lax.complex(*jnp.split(parts, 2)) if jnp.iscomplexobj(total) else parts
        return combine(t)

    return jax.jacfwd(of_parts)(_real_parts(total, axis=0))


def _through(
    slope: Inexact[Array, "q _"], values: Float[Array, "*levels _ m"]
) -> Inexact[Array, "*levels q m"]:
    """Return Dg(t) f, given the real parts of f. A value that is not finite makes all
    values NaN that depend on it, and no others."""
    finite = jnp.isfinite(values)
    image = dot(slope, jnp.where(finite, values, 0).astype(slope.dtype))
    undefined = dot((slope != 0).astype(values.dtype), (~finite).astype(values.dtype))
    return jnp.where(undefined > 0, jnp.nan, image)


def _unbiased(combine: ScalarFunction, total: Total, shifts: Samples | None) -> Values:
    """Return g(t) without its bias, as the jackknife finds it from the shifts d_i."""
    value = combine(total)
    if shifts is None:
        return value
    held = jax.lax.stop_gradient(total)
    others = jax.vmap(combine, in_axes=1, out_axes=1)(held[:, None] - shifts)
    return value + (shifts.shape[1] - 1) * mean(combine(held)[:, None] - others)


def _shifts(combine: ScalarFunction, total: Total, samples: Samples) -> Samples | None:
    """Return the d_i if there are enough samples. They are zero if g is undefined at some
    t_{-i}, as the log of a negative number is, because then the bias is unknown."""
    k = samples.shape[1]
    if k < FEWEST_SAMPLES:
        return None
    shifts = (samples - total[:, None]) / (k - 1)
    value, unbiased = combine(total), _unbiased(combine, total, shifts)
    undefined = jnp.any(jnp.isfinite(value) & ~jnp.isfinite(unbiased))
    return jnp.where(undefined, 0, shifts)
