"""Whether an operator is what it says."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import PRNGKeyArray

from traceax._core.checks import check_key, show
from traceax._core.checks import check_operator as check_is_operator
from traceax._core.operator import resolution
from traceax._testing.promises import promises
from traceax._testing.report import Report
from traceax._testing.subject import Subject, length


def check_operator(
    operator: lx.AbstractLinearOperator, key: PRNGKeyArray, *, rtol: float | None = None
) -> None:
    """Check that a lineax operator is linear, agrees with itself, and keeps its promises.

    By random vectors: that `mv` maps the input to the output structure, is linear (over
    the complex numbers, if it is complex), and the same under `jax.vmap`; that `transpose`,
    `lx.conj` and `as_matrix` are those of what is applied; that what lineax is told of it
    is true (symmetric, positive or negative semidefinite, diagonal, triangular,
    tridiagonal, unit diagonal); that derivatives of an application, forward and reverse,
    are each other's and agree with differences.

    **Arguments**

    - `operator`: any lineax operator, of a class of your own or a function, real or
      complex, of arrays or pytrees, square or not.
    - `key`: a JAX random key.
    - `rtol`: the relative error to be taken for rounding. Default `None`: eps^0.6 of the
      operator's dtype, 4e-10 in double and 7e-5 in single precision. Raise it for operators
      that are only solved for, to a tolerance.

    **Returns** `None`, if nothing is wrong.

    **Raises** `AssertionError` that lists everything that is wrong, and by how much;
    `TypeError` if `operator` is not a lineax operator or `key` not a random key;
    `ValueError` if `operator` mixes real and complex leaves or has no dimension; if `key`
    is an array of keys.

    **Derivatives**: none.

    **Cost**: some 60 applications; n more where n is at most 64, for `as_matrix`.

    **Example**

    ```python
    >>> import jax, jax.numpy as jnp, lineax as lx
    >>> from traceax.testing import check_operator
    >>> matrix = jnp.asarray([[2.0, 1.0], [0.0, 2.0]])
    >>> check_operator(lx.MatrixLinearOperator(matrix), jax.random.key(0))
    >>> try:
    ...     wrong = lx.MatrixLinearOperator(matrix, lx.symmetric_tag)
    ...     check_operator(wrong, jax.random.key(0))
    ... except AssertionError as error:
    ...     print("symmetric" in str(error))
    True

    ```

    **Reference**: the dot-product test of adjoints: Claerbout (1985), Imaging the Earth's
    Interior, Blackwell; Ritz values: Halko, Martinsson and Tropp (2011), Finding structure
    with randomness, SIAM Review 53(2), doi:10.1137/090771806.
    """
    check_is_operator("testing.check_operator", operator, square=False)
    check_key("testing.check_operator", key)
    report = Report("check_operator", operator)
    subject = Subject.of(operator, key, rtol)
    with report.step("mv"):
        if _maps_structures(report, operator):
            for step in (_linear, _batched, _transposed, _conjugated, _formed):
                with report.step(step.__name__.strip("_")):
                    step(report, subject)
            promises(report, subject)
            with report.step("derivative"):
                _derivative(report, subject)
    report.conclude()


def _maps_structures(report: Report, operator: lx.AbstractLinearOperator) -> bool:
    into, out = operator.in_structure(), operator.out_structure()
    got = eqx.filter_eval_shape(operator.mv, into)
    if fits := eqx.tree_equal(got, out) is True:
        return fits
    report.add(f"mv: returns {show(got)}, but out_structure is {show(out)}.")
    return False


def _linear(report: Report, s: Subject) -> None:
    x, y = s.vector(0), s.vector(1)
    a, b = (0.6 - 0.8j, 1.7j) if jnp.iscomplexobj(x) else (0.6, -1.7)
    ax, by = s.apply(x), s.apply(y)
    mixed = s.apply((a * x + b * y).astype(x.dtype))
    size = jnp.max(jnp.abs(a * ax)) + jnp.max(jnp.abs(b * by))
    cure = "mv must be linear, over complex numbers too: no offsets, norms, conjugates."
    report.close(
        "linear, A(ax + by) = a Ax + b Ay", mixed, a * ax + b * by, s.rtol * size, cure
    )


def _batched(report: Report, s: Subject) -> None:
    block = jnp.stack([s.vector(2), s.vector(3)], axis=1)
    each = jnp.stack([s.apply(block[:, 0]), s.apply(block[:, 1])], axis=1)
    got = s.apply_block(block)
    room = s.rtol * jnp.max(jnp.abs(each))
    report.close(
        "mv under jax.vmap", got, each, room, "Write mv in jax.numpy, for one vector."
    )


def _transposed(report: Report, s: Subject) -> None:
    transpose = s.operator.transpose()
    x, y = s.vector(4), s.vector(5, s.operator.out_structure())
    ax, aty = s.apply(x), s.apply(y, transpose)
    cure = "transpose() is that of what mv applies, without conjugation."
    room = s.rtol * (length(ax) * length(y) + length(aty) * length(x))
    report.close("transpose, y.(Ax) = (A^T y).x", aty @ x, y @ ax, room, cure)


def _conjugated(report: Report, s: Subject) -> None:
    x = s.vector(6)
    want = s.apply(x).conj()
    got = s.apply(x.conj(), lx.conj(s.operator))
    room = s.rtol * length(want)
    report.close(
        "lx.conj, conj(A) conj(x) = conj(Ax)", got, want, room, "Register lx.conj."
    )


def _formed(report: Report, s: Subject) -> None:
    """One may refuse by NotImplementedError."""
    x = s.vector(7)
    if x.size > 64:
        return
    try:
        matrix = s.operator.as_matrix()
    except NotImplementedError:
        return
    want = s.apply(x)
    room = s.rtol * length(want)
    report.close(
        "as_matrix", matrix @ x, want, room, "as_matrix() is that of what mv applies."
    )


# Derivatives.


def _derivative(report: Report, s: Subject) -> None:
    """Of <w, A x> in what the operator holds, and of A x in x."""
    x = s.vector(30)
    _, tangent = jax.jvp(s.apply, (x,), (s.vector(31),))
    want = s.apply(s.vector(31))
    room = s.rtol * jnp.max(jnp.abs(want))
    report.close("derivative in the vector", tangent, want, room, "It is mv itself.")
    arrays, rest = eqx.partition(s.operator, eqx.is_inexact_array)
    if not jax.tree.leaves(arrays):
        return
    w = s.vector(32, s.operator.out_structure())

    def form(arrays: Any) -> Any:
        operator = eqx.combine(arrays, rest)
        return jnp.sum(w.conj() * s.apply(x, operator)).real

    leaves, treedef = jax.tree.flatten(arrays)
    drawn = [_direction(s, i, leaf) for i, leaf in enumerate(leaves)]
    direction = jax.tree.unflatten(treedef, drawn)
    value, slope = jax.jvp(form, (arrays,), (direction,))
    gradients = jax.tree.leaves(jax.grad(form)(arrays))
    pairs = list(zip(gradients, drawn, strict=True))
    size = (
        abs(value)
        + abs(slope)
        + sum(length(g.ravel()) * length(d.ravel()) for g, d in pairs)
    )
    backwards = sum(jnp.sum(g * d).real for g, d in pairs)
    cure = "Differentiate the application as JAX does, or write both rules of one."
    report.close(
        "reverse derivative = forward derivative", backwards, slope, s.rtol * size, cure
    )
    step = resolution(s.operator) ** (1 / 3)
    ends = [
        form(jax.tree.map(lambda a, d, h=h: a + (h * d).astype(a.dtype), arrays, direction))
        for h in (step, -step)
    ]
    room = (10 * step + s.rtol) * size
    difference = (ends[0] - ends[1]) / (2 * step)
    report.close("derivative = difference quotient", slope, difference, room, cure)


def _direction(s: Subject, i: int, leaf: Any) -> Any:
    """As large as the leaf is."""
    key = jax.random.fold_in(s.key, 40 + i)
    drawn = jax.random.normal(key, leaf.shape, leaf.dtype)
    return drawn * jnp.max(jnp.abs(leaf), initial=0).astype(leaf.dtype)
