"""What every estimator returns: an estimate with its error, how it prints, and how several
estimates of one quantity become one.

A number prints to two digits of its standard error, an exact one as it is, one whose error
is rounding as the shortest number within it; more than ten numbers as their shape and the
relative norm of their errors; values that cannot be read here as Equinox prints a module.

`pool` has weights w_j, the shares of the applications spent. They are fixed before any
value is seen. The variance is the larger of

    sum_j w_j^2 se_j^2    and    sum_j w_j (x_j - mean)^2 / (J - 1).

An infinite se_j is unknown. It is taken from the known ones, as if the variance of an
application were the same in all parts: w_j se_j^2 = c, so c is the sum of w_i^2 se_i^2 over
the known parts, over that of their w_i. It is no less than the distance of x_j from the
mean of the known parts, which matters if they are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.core import Tracer
from jax.scipy.special import betainc
from jaxtyping import Array, Bool, Float, Inexact, Int, PRNGKeyArray, PyTree, Real

from traceax._core.canonical import compiled, is_concrete
from traceax._core.checks import check_callable, check_key, check_returned, invalid

_MOST_SHOWN = 10


def in_words(estimate: Any) -> str:
    """`96.6 ± 3.1 (50 matvecs, xtrace)`, or a line for each leaf."""
    if not is_readable(estimate):
        return eqx.tree_pformat(estimate)
    values = jax.tree.leaves_with_path(estimate.value)
    errors = jax.tree.leaves(estimate.standard_error)
    lines = []
    for (path, value), error in zip(values, errors, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        words = _array_in_words(np.asarray(value), np.asarray(error))
        lines.append(f"{name}: {words}" if path else words)
    total = int(np.sum(np.asarray(estimate.num_matvecs)))  # the sum over a batch
    cost = f"({total} matvec{'s' if total != 1 else ''}"
    cost += f", {estimate.method})" if estimate.method else ")"
    return f"{lines[0]} {cost}" if len(lines) == 1 else "\n".join([*lines, cost])


def formatted(estimate: Any, spec: str) -> str:
    """One number and its error, each by `spec`."""
    if not spec:
        return str(estimate)
    leaves = jax.tree.leaves(estimate.value)
    if not is_readable(estimate) or len(leaves) != 1 or np.ndim(leaves[0]):
        must = "be asked of one number whose value is there"
        got = f"{spec!r} for values of shape {jax.tree.map(np.shape, estimate.value)}"
        cure = "Format entries of `value` and `standard_error`."
        raise invalid(TypeError, "Estimate.__format__", "spec", must, got, cure)
    value = np.asarray(leaves[0]).item()
    error = np.asarray(jax.tree.leaves(estimate.standard_error)[0]).item()
    shown = format(value, spec)
    return shown if error == 0 else f"{shown} ± {error:{spec}}"


def is_readable(estimate: Any) -> bool:
    """Whether this process can read every number in it."""

    def readable(leaf: Any) -> bool:
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            return leaf.is_fully_addressable or leaf.is_fully_replicated
        return isinstance(leaf, int | float | complex | np.ndarray | np.generic)

    leaves = jax.tree.leaves(estimate)
    same = jax.tree.structure(estimate.value) == jax.tree.structure(estimate.standard_error)
    return bool(leaves) and same and is_concrete(leaves) and all(map(readable, leaves))


def _array_in_words(value: np.ndarray, error: np.ndarray) -> str:
    if value.size <= _MOST_SHOWN:
        pairs = zip(value.ravel(), error.ravel(), strict=True)
        words = ", ".join(_number_in_words(v, e.item()) for v, e in pairs)
        return f"[{words}]" if value.ndim else words
    if not np.any(error) and np.all(np.isfinite(value)):
        return f"{value.shape} exact"
    with np.errstate(all="ignore"):
        largest = np.max(np.abs(value))
        share = np.linalg.norm(error / largest) / np.linalg.norm(value / largest)
    return f"{value.shape} ± {100 * share:.2g} % in norm"


def _number_in_words(value: np.generic, error: float) -> str:
    """A number to two digits of its error."""
    if error == 0:
        return str(value)
    if not np.isfinite(error) or not np.isfinite(value):
        shown = f"{value.item():.6g}"
        shown = f"({shown})" if np.iscomplexobj(value) else shown
        return f"{shown} ± {error:.2g}"
    size = max(abs(value.item()), error)
    power = int(np.floor(np.log10(size) + 1e-6))
    if -4 <= power < 6:
        return _fixed_point(value.item(), error)
    # The number may be subnormal: 10^power must not be.
    power = max(power, -300)
    scale = 10.0**power
    return f"({_fixed_point(value.item() / scale, error / scale)})e{power:+03d}"


def _fixed_point(value: float | complex, error: float) -> str:
    # 1e-6 makes up for single precision, in which 0.1 may be a little less.
    decimals = max(0, 1 - int(np.floor(np.log10(error) + 1e-6)))
    shown = f"{value:.{min(decimals, 16)}f}"
    if decimals > 9:
        shorter = (f"{value:.{d}f}" for d in range(17))
        shown = next((s for s in shorter if abs(complex(s) - value) <= error), shown)
    shown = f"({shown})" if isinstance(value, complex) else shown
    return f"{shown} ± {error:.1e}" if decimals > 6 else f"{shown} ± {error:.{decimals}f}"


class Name(str):
    """A string that is a pytree without leaves. To JAX all names are equal, so that
    estimates of different methods have one structure, which conditionals and loops need."""


@dataclass(frozen=True)
class _Any:
    """A name in the structure of a pytree, equal to all others."""

    name: str = field(compare=False)


jax.tree_util.register_pytree_node(
    Name, lambda name: ((), _Any(name)), lambda structure, _: Name(structure.name)
)
export.register_pytree_node_serialization(
    Name,
    serialized_name="traceax.Name",
    serialize_auxdata=lambda structure: structure.name.encode(),
    deserialize_auxdata=lambda name: _Any(name.decode()),
)


class Estimate(eqx.Module):
    """An estimate, its standard error, and what it cost.

    It is a pytree: return it from `jax.jit`, batch it with `jax.vmap`, stack it with
    `jax.lax.scan`. Only `value` is differentiable. `print` shows it to two digits of its
    error, `96.6 ± 3.1 (50 matvecs, xtrace)`; formats like `f"{estimate:.3f}"` work.

    **Attributes** (more on error bars is in the guide's conventions)

    - `value`: an array of shape `()` for a trace; for a diagonal, a pytree with the
      operator's input structure. NaN if the operator is found not to be what the function
      needs: the conventions tell which, and the way out.
    - `standard_error`: real, with the structure of `value`: its estimated standard
      deviation. `inf` for a single probe, 0 if `value` is exact. Differentiation in reverse
      mode raises an error, the tangent in forward mode is infinite (stored diagonals: 0).
    - `num_matvecs`: the number of operator applications spent, adjoint ones included.
    - `degrees_of_freedom`: of Student's t in `interval`: how well the probes determine
      `standard_error`. At most their number less one, and fewer where samples are skewed.
    - `converged`: of `adaptive_trace`, whether the tolerance was met. `None` of others.
    - `grid`: of `spectral_density`, the points of its value. `None` of others.
    - `method`: a static string: `"exact"`, or the function that made it, maybe by automatic
      choice: `"hutchinson_trace, 36 colours"`. Where estimates of two methods meet, in
      `jnp.where`, `jax.lax.cond` or a loop, the result names one of them; what goes through
      your own `jax.jit` as an *argument* has the method of the first call after it.

    **Example**

        >>> import jax, lineax as lx, traceax as tx
        >>> operator = lx.DiagonalLinearOperator(jax.numpy.arange(1.0, 101.0))
        >>> estimate = tx.xtrace(operator, jax.random.key(0), 40)
        >>> low, high = estimate.interval(0.95)
        >>> bool(low < 5050.0 < high)
        True
    """

    value: PyTree[Inexact[Array | np.ndarray, "..."]]
    standard_error: PyTree[Float[Array | np.ndarray, "..."]]
    num_matvecs: int | Int[Array | np.ndarray, "..."]
    degrees_of_freedom: float | Float[Array, "..."] = 1e6
    converged: Bool[Array, ""] | bool | None = None
    grid: Float[Array | np.ndarray, "*batch points"] | None = None
    method: str = eqx.field(converter=Name, default="")

    def __str__(self) -> str:
        return in_words(self)

    def __format__(self, spec: str) -> str:
        return formatted(self, spec)

    def __repr__(self) -> str:
        return f"<{in_words(self)}>" if is_readable(self) else in_words(self)

    def interval(
        self, level: float | Float[Array, ""] = 0.95
    ) -> tuple[PyTree[Array], PyTree[Array]]:
        """A two-sided Student-t confidence interval for the exact value.

        **Arguments**: `level`: the probability, strictly between 0 and 1, that the interval
        contains the exact value. Default 0.95.

        **Returns** `(low, high)`, each with the structure and shape of `value`; they cannot
        be differentiated. For complex values take an `Estimate` of the real part.
        """
        name, cure = "Estimate.interval", "Pass 0.95, say."
        if not isinstance(level, float | int | np.generic | np.ndarray | jax.Array):
            must = "be a number, because it is a probability"
            raise invalid(TypeError, name, "level", must, repr(level), cure)
        known = [] if isinstance(level, Tracer) else np.ravel(level)
        if not all(0 < number < 1 for number in known):
            must = "be strictly between 0 and 1, because it is a probability"
            raise invalid(ValueError, name, "level", must, repr(level), cure)
        if any(jnp.iscomplexobj(leaf) for leaf in jax.tree.leaves(self.value)):
            must, got = "be asked of a real value, as these have an order", "a complex one"
            cure = "Use `value` and `standard_error`, or the operator's Hermitian part."
            raise invalid(TypeError, name, "...", must, got, cure)
        degrees = jnp.asarray(self.degrees_of_freedom)

        def ends(value: Any, error: Any) -> tuple[Array, Array]:
            quantile = compiled(student_quantile, level, degrees.astype(error.dtype))
            # Each estimate of a batch has one quantile for all of its entries.
            entries = (1,) * (error.ndim - quantile.ndim)
            quantile = quantile.reshape(quantile.shape + entries)
            width = jnp.where(error == 0, 0, error * quantile)
            return value - width, value + width

        pairs = jax.tree.map(ends, self.value, self.standard_error)
        outer, inner = jax.tree.structure(self.value), jax.tree.structure((0, 0))
        low, high = jax.tree.transpose(outer, inner, pairs)
        return low, high


def exportable(example: eqx.Module) -> None:
    """Let `jax.export` write the class of `example`, which must have no static field: its
    auxiliary data are then the same for all instances, and need not be written."""
    node = jax.tree.structure(example).node_data()
    assert node is not None
    export.register_pytree_node_serialization(
        type(example),
        serialized_name=f"traceax.{type(example).__name__}",
        serialize_auxdata=lambda _: b"",
        deserialize_auxdata=lambda _: node[1],
    )


exportable(Estimate(None, None, 0))


def exact_estimate(
    value: PyTree[Inexact[Array, "..."]], spent: int, error: Array | float = 0.0
) -> Estimate:
    """NaN has no error."""

    def of(x: Inexact[Array, "..."]) -> Float[Array, "..."]:
        return jnp.where(jnp.isnan(x), jnp.nan, error).astype(x.real.dtype)

    errors = jax.tree.map(of, jax.lax.stop_gradient(value))
    return Estimate(value, errors, spent, method="exact")


@eqx.filter_custom_jvp
def nondifferentiable(error: PyTree[Array], source: Any = None) -> PyTree[Array]:
    """A standard error made of differentiable numbers, or of frozen ones if `source` is the
    differentiable number, of the same shape, that they were frozen from."""
    return error


@nondifferentiable.def_jvp
def _nondifferentiable_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    error = primals[0]
    moved = [tangent for tangent in tangents if tangent is not None]
    return error, error_tangent(error, moved[-1].real) if moved else None


def error_tangent(error: Array, tangent: Array) -> Array:
    """The tangent of a standard error: infinite in forward mode, an error in reverse mode.

    (NaN would stop `jax_debug_nans`.) The condition always holds, but the compiler does not
    know it, so it keeps the error of reverse mode.
    """
    unknown = jnp.where(error > -1, jnp.inf, tangent)
    return eqxi.nondifferentiable_backward(
        unknown,
        msg="traceax: `standard_error` of an Estimate must not be differentiated, because "
        "the derivative rule freezes what it is made of, but got a cotangent for it. Wrap "
        "it in jax.lax.stop_gradient.",
        symbolic=False,
    )


def student_quantile(
    level: float | Float[Array, ""], degrees: Real[Array, "*shape"]
) -> Real[Array, "*shape"]:
    """The t with P(|T| > t) = 1 - level, T having Student's distribution.

    It is I_u(degrees/2, 1/2), u = degrees / (degrees + t^2), which rises with u.
    Bisection finds log u: u may be too small for 1 - u, or too close to 1 for u.
    """
    dtype = degrees.dtype
    degrees = jnp.clip(degrees, 0.25, 1e4)
    half = jnp.asarray(0.5, dtype)

    def tail(log_u: Array) -> Array:
        u, complement = jnp.exp(log_u), -jnp.expm1(log_u)
        direct = betainc(degrees / 2, half, u)
        return jnp.where(u < 0.5, direct, 1 - betainc(half, degrees / 2, complement))

    def halve(_: Array | int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = (low + high) / 2
        below = tail(middle) < 1 - level
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    least = jnp.full_like(degrees, jnp.log(jnp.finfo(dtype).tiny))
    log_u, _ = jax.lax.fori_loop(0, 60, halve, (least, jnp.zeros_like(degrees)))
    return jnp.sqrt(degrees * -jnp.expm1(log_u) / jnp.exp(log_u))


def pool(estimates: Sequence[Estimate] | Estimate) -> Estimate:
    """Combine several estimates of the same quantity, made with independent keys, into one.

        value = sum_j m_j value_j / sum_j m_j,    m_j the applications spent on estimate j

    Unbiased if the estimates are.

    **Arguments**: `estimates`: a sequence, or one `Estimate` of which every leaf has a
    leading axis of runs, as from `jax.vmap`. The *same* key twice is not detected.

    **Returns** an `Estimate` like the parts. `standard_error` comes from theirs, added in
    squares, or from their spread, if this is larger or if each has one probe only; an
    infinite one among finite ones from these. `num_matvecs` is the sum.

    **Derivatives**: those of the weighted mean. **Cost**: no applications.

    **Example**

        >>> import jax, traceax as tx
        >>> operator = tx.as_operator(jax.random.normal(jax.random.key(0), (200, 200)))
        >>> keys = jax.random.split(jax.random.key(1), 4)
        >>> estimates = [tx.hutchinson_trace(operator, key, 50) for key in keys]
        >>> print(tx.pool(estimates).num_matvecs)
        200

    **Reference**: Welch (1947), The generalization of Student's problem, Biometrika 34.
    """
    if isinstance(estimates, Estimate):
        _check_batch("pool", estimates)
        whole, parts = estimates, []
    else:
        _check_parts("pool", estimates)
        names = ("value", "standard_error", "num_matvecs", "degrees_of_freedom")
        parts = [
            Estimate(*(getattr(e, name) for name in names), method=e.method)
            for e in estimates
        ]
        whole = jax.tree.map(lambda *x: jnp.stack(list(map(jnp.asarray, x))), *parts)
    values, structure = jax.tree.flatten(whole.value)
    errors = jax.lax.stop_gradient(jax.tree.leaves(whole.standard_error))
    runs = values[0].shape[:1]
    counts = jnp.broadcast_to(jnp.asarray(whole.num_matvecs), runs)
    degrees = jnp.broadcast_to(jnp.asarray(whole.degrees_of_freedom), runs)
    shares = jnp.where(jnp.any(counts), counts, 1)
    shares = shares / jnp.sum(shares)
    pooled = [_pooled(*leaf, shares, degrees) for leaf in zip(values, errors, strict=True)]
    return Estimate(
        jax.tree.unflatten(structure, [value for value, _, _ in pooled]),
        jax.tree.unflatten(
            structure, [nondifferentiable(e, value) for value, e, _ in pooled]
        ),
        sum(e.num_matvecs for e in parts) if parts else jnp.sum(counts),
        jnp.min(jnp.stack([freedom for _, _, freedom in pooled])),
        method=" and ".join(dict.fromkeys(e.method for e in parts)) or whole.method,
    )


def _pooled(
    values: Inexact[Array, "runs ..."],
    errors: Float[Array, "runs ..."],
    shares: Float[Array, " runs"],
    degrees: Float[Array, " runs"],
) -> tuple[Inexact[Array, "..."], Float[Array, "..."], Float[Array, ""]]:
    """Value, standard error, and the least degrees of freedom of any entry. The squares of
    errors are scaled by the largest one, so that they neither overflow nor vanish."""
    axes = (-1,) + (1,) * (values.ndim - 1)
    share, degree = (x.astype(errors.dtype).reshape(axes) for x in (shares, degrees))
    frozen, weight = jax.lax.stop_gradient(values), share.astype(values.dtype)
    value = jnp.sum(weight * values, axis=0)
    deviations = jnp.abs(frozen - jax.lax.stop_gradient(value)[None])
    unknown = jnp.isinf(errors)
    sizes = jnp.maximum(jnp.where(unknown, 0, errors), deviations)
    scale = jnp.maximum(jnp.max(sizes, axis=0), jnp.finfo(errors.dtype).tiny)
    squares = jnp.where(unknown, 0, (share * (errors / scale[None])) ** 2)
    within = jnp.sum(squares, axis=0)
    welch = within**2 / jnp.sum(jnp.where(unknown, 0, squares**2 / degree), axis=0)
    # The squared errors of unknown parts, from those of known ones and from their mean.
    known = jnp.sum(jnp.where(unknown, 0, share), axis=0)
    share_of_known = jnp.where(unknown, 0, share) / jnp.where(known > 0, known, 1)[None]
    mean = jnp.sum(share_of_known.astype(values.dtype) * frozen, axis=0)
    apart = share * (jnp.abs(frozen - mean[None]) / scale[None])
    alike = share * (within / jnp.where(known > 0, known, 1))[None]
    within += jnp.sum(jnp.where(unknown, jnp.maximum(alike, apart**2), 0), axis=0)
    runs = jnp.sum(share > 0, dtype=errors.dtype)
    others = jnp.maximum(runs - 1, 1)
    between = jnp.sum(share * (deviations / scale[None]) ** 2, axis=0) / others
    within = jnp.where(known > 0, within, jnp.where(runs > 1, 0, jnp.inf))
    error = scale * jnp.sqrt(jnp.maximum(within, between))
    # The quadratic forms of single probes are skewed (see `_linalg.jackknife`).
    few = jnp.where((within == 0) & (known > 0), 1e4, others / 3)
    freedom = jnp.where(jnp.isfinite(welch), jnp.minimum(welch, 1e4), few)
    return value, error, jnp.min(freedom)


def _check_parts(name: str, estimates: object) -> None:
    """A sequence of estimates of one quantity."""
    if not isinstance(estimates, Sequence) or not estimates:
        must, cure = "be a sequence or batch of estimates", "Pass a list of at least one."
        empty = isinstance(estimates, Sequence)
        kind, got = (ValueError, "none") if empty else (TypeError, type(estimates).__name__)
        raise invalid(kind, name, "estimates", must, got, cure)
    for place, part in enumerate(estimates):
        if not isinstance(part, Estimate):
            must, got = "hold estimates", f"{type(part).__name__} as number {place}"
            cure = "Keep what the estimators return, not its `value`."
            raise invalid(TypeError, name, "estimates", must, got, cure)
        if _described(part) != _described(estimates[0]):
            must = f"be of one quantity, like number 0, {_described(estimates[0])}"
            got, cure = f"{_described(part)} as number {place}", "Pool each on its own."
            raise invalid(ValueError, name, "estimates", must, got, cure)


def _check_batch(name: str, estimates: Estimate) -> None:
    """One estimate, of which every leaf has a leading axis of runs."""
    leaves = jax.tree.leaves((estimates.value, estimates.standard_error))
    runs = {jnp.shape(leaf)[:1] for leaf in leaves}
    counts = jnp.shape(estimates.num_matvecs), jnp.shape(estimates.degrees_of_freedom)
    if len(runs) != 1 or runs == {()} or not set(counts) & runs or max(runs)[0] == 0:
        must = "be a sequence of estimates, or one whose leaves have a leading axis of runs"
        got = f"{_described(estimates)} with num_matvecs of shape {counts[0]}"
        cure = "Pass a list, or what jax.vmap over keys returned."
        raise invalid(ValueError, name, "estimates", must, got, cure)


def _described(part: Estimate) -> str:
    return eqx.tree_pformat(jax.tree.map(jnp.asarray, part.value))


Result = TypeVar("Result")


def unbiased_square(
    estimate_fn: Callable[[PRNGKeyArray], Result], key: PRNGKeyArray
) -> Result:
    """Estimate |t|^2 without bias, where `estimate_fn(key)` estimates t without bias.

        value = Re conj(a) b,    a and b estimates of t with independent keys

    The square of one estimate is on average too large by its variance, and training on it
    does not minimise t^2. The product of two independent ones has the mean t^2, and so has
    its gradient.

    **Arguments** (`key` and errors are in the guide's conventions): `estimate_fn`: a
    function of a key that returns an `Estimate`, or an array or pytree of arrays made from
    one, such as the residual `lambda key: tx.laplacian(u, x, key, 1).value - f(x)`. It is
    called once, on a batch of two keys.

    **Returns** the square, entry by entry, real: an `Estimate` if `estimate_fn` returns
    one, else arrays. It may be negative. `standard_error` is that of a product; of two
    estimates of one probe each it is computed from their difference.

    **Derivatives**: those of `estimate_fn`, unbiased if it has unbiased ones. **Cost**:
    twice that of `estimate_fn`.

    **Example**

        >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
        >>> operator = lx.MatrixLinearOperator(jnp.array([[1.0, 2.0], [2.0, 3.0]]))
        >>> once = lambda key: tx.hutchinson_trace(operator, key, 1).value
        >>> keys = jax.random.split(jax.random.key(0), 10_000)
        >>> squares = jax.vmap(lambda key: tx.unbiased_square(once, key))(keys)
        >>> bool(abs(squares.mean() - 4.0**2) < 1.0)  # the mean of once(key)**2 is 32
        True

    **Reference**: Baird (1995), Residual algorithms, ICML; Hu et al. (2024),
    arXiv:2312.14499.
    """
    cure = "Pass lambda key: traceax.trace(operator, key), say."
    check_callable("unbiased_square", "estimate_fn", estimate_fn, "of a key", cure)
    check_key("unbiased_square", key)
    # A leaf that is not an array, a number of applications say, gets no batch axis.
    twice = eqx.filter_vmap(estimate_fn, out_axes=eqx.if_array(0))
    both = twice(jax.random.split(key))
    if isinstance(both, Estimate):
        return _square(both)  # pyright: ignore[reportReturnType]
    check_returned("unbiased_square", "estimate_fn", both, "numbers", "an Estimate, or ")
    return jax.tree.map(_product, both)


def _product(pair: Array) -> Array:
    return (pair[0].conj() * pair[1]).real


def _square(both: Estimate) -> Estimate:
    def error(value: Array, own: Array) -> Array:
        apart = jnp.abs(value[0] - value[1]) / 2**0.5
        own = jnp.where(jnp.isinf(own), apart, own)
        sizes = jnp.abs(value)
        return nondifferentiable(jnp.hypot(sizes[0] * own[1], sizes[1] * own[0]))

    own = jax.lax.stop_gradient(both.standard_error)
    return Estimate(
        value=jax.tree.map(_product, both.value),
        standard_error=jax.tree.map(error, both.value, own),
        num_matvecs=_total(both.num_matvecs),
        degrees_of_freedom=jnp.maximum(_total(both.degrees_of_freedom), 1.0),
        method=both.method,
    )


def _total(count: Any) -> Any:
    """The total of both estimates; an array if each decided at run time."""
    return jnp.sum(count, axis=0, dtype=count.dtype) if eqx.is_array(count) else 2 * count
