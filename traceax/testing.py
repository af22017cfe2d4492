"""Checks of your own code, and generated operators. Not imported by `import traceax`."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from traceax._core import checks, questions
from traceax._core import operator as ops
from traceax._core.checks import require
from traceax._core.estimate import Estimate
from traceax._core.vectors import as_columns, common_dtype, flatten, unflatten
from traceax._linalg.columns import over, promoted, times
from traceax._probes.samplers import SamplerLike, as_sampler, normal

if TYPE_CHECKING:
    import hypothesis.strategies as st

__all__ = ["check_estimator", "check_operator", "check_sampler", "operators"]

Names = Sequence[str] | None
Pair = tuple[lx.AbstractLinearOperator, Array]
Facts = Iterator[tuple[str, Any, Any, Any]]

_SINGLE: dict[str, Callable[[Any], lx.AbstractLinearOperator]] = {
    "Matrix": lx.MatrixLinearOperator,
    "PyTree": lambda m: lx.PyTreeLinearOperator(
        [jnp.array_split(rows, 2, axis=1) for rows in jnp.array_split(m, 2)],
        jax.eval_shape(lambda: jnp.array_split(m[0], 2)),
    ),
    "Jacobian": lambda m: lx.JacobianLinearOperator(lambda x, _: m @ jnp.sin(x), 0 * m[0]),
    "Function": lambda m: lx.FunctionLinearOperator(lambda x: m @ x, jax.typeof(m[0])),
    "Diagonal": lambda m: lx.DiagonalLinearOperator(m.diagonal()),
    "Tridiagonal": lambda m: lx.TridiagonalLinearOperator(*map(m.diagonal, (0, -1, 1))),
    "Identity": lambda m: m[0, 0] * lx.IdentityLinearOperator(jax.typeof(m[0])),
    "Tangent": lambda m: lx.TangentLinearOperator(*[lx.MatrixLinearOperator(m)] * 2),
}
_WRAPPERS: dict[str, Callable[[Any, Any, Any, Any], lx.AbstractLinearOperator]] = {
    "Tagged": lambda a, same, signs, three: lx.TaggedLinearOperator(a, ()),
    "Neg": lambda a, same, signs, three: -a,
    "Mul": lambda a, same, signs, three: a * three,
    "Div": lambda a, same, signs, three: a / three,
    "Add": lambda a, same, signs, three: a + same,
    "Composed": lambda a, same, signs, three: a @ signs,
}
_SPECTRA: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "flat": lambda i: 3 - 2 * i / i.size,
    "decaying": lambda i: 0.3**i,
    "steps": lambda i: 0.01 ** (i // 2),
    "indefinite": lambda i: (1 + i) * (-1.0) ** i,
    "rank-deficient": lambda i: (1 + i) * (2.0 * i < i.size),
    "badly scaled": lambda i: 1e12 * (1 + i),
}


def operators(
    *,
    kinds: Names = None,
    sizes: Sequence[int] = (1, 2, 3, 8),
    dtypes: Names = None,
    spectra: Names = None,
    semidefinite: bool = False,
    depth: int = 2,
) -> st.SearchStrategy[Pair]:
    """Return a hypothesis strategy for square operators of every class of lineax.

    It draws pairs `(operator, dense)` of an operator, single or nested, on arrays or on
    pytrees, and its matrix. Some symmetric ones are tagged. Examples shrink to n = 1.

    **Arguments**

    - `kinds`: names of lineax's classes without the ending `LinearOperator`, such as
      `"Matrix"` or `"Add"`. Default `None`, which means all but `"Tangent"`, about which
      lineax cannot answer all questions.
    - `sizes`: the dimensions n. Default `(1, 2, 3, 8)`. Each size is compiled separately.
    - `dtypes`: names of dtypes. Default `None`, which means real and complex dtypes of the
      enabled precisions.
    - `spectra`: names of distributions of eigenvalues or singular values. Default `None`,
      which means all of `"flat"`, `"decaying"`, `"steps"`, `"indefinite"`,
      `"rank-deficient"`, `"badly scaled"`.
    - `semidefinite`: whether all operators are positive semidefinite, and tagged so.
      Default `False`.
    - `depth`: the largest number of wrappers around an operator. Default 2.

    **Returns** a strategy.

    **Cost**: n matvecs.

    **Example**

        >>> import hypothesis, traceax.testing
        >>> @hypothesis.settings(max_examples=5, deadline=None, derandomize=True)
        ... @hypothesis.given(traceax.testing.operators(sizes=(1, 3), spectra=("flat",)))
        ... def test_transposing_keeps_the_trace(pair):
        ...     assert abs(pair[0].T.as_matrix().trace() - pair[1].trace()) < 1e-4
        >>> test_transposing_keeps_the_trace()

    **Reference**: MacIver and Hatfield-Dodds (2019),
    [doi:10.21105/joss.01891](https://doi.org/10.21105/joss.01891).

    **See also**: `check_operator`, `check_estimator`.
    """
    import hypothesis.strategies as st  # noqa: PLC0415

    known = [*_SINGLE, *_WRAPPERS]
    kinds = [kind for kind in known if kind != "Tangent"] if kinds is None else kinds
    spectra = list(_SPECTRA) if spectra is None else spectra
    if semidefinite:  # these need not be semidefinite, though the matrix is
        kinds = [kind for kind in kinds if kind not in ("Tridiagonal", "Neg", "Composed")]
        spectra = [name for name in spectra if name != "indefinite"]
    for name, got, every in (("kinds", kinds, known), ("spectra", spectra, [*_SPECTRA])):
        fits = set(got) <= set(every) and not set(got) <= set(_WRAPPERS)
        must, cure = f"be names among {every}", f"Not of wrappers alone: add {every[0]}."
        checks.require(fits, "testing.operators", name, must, [*got], cure)
    double = ("float64", "complex128") if jnp.result_type(float) == np.float64 else ()
    dtypes = dtypes or ("float32", "complex64", *double)

    @st.composite
    def pairs(draw: Any) -> Pair:
        n, dtype, name = (draw(st.sampled_from(each)) for each in (sizes, dtypes, spectra))
        matrix = _hermitian(name, n, dtype, seed=draw(st.integers(0, 99)))
        if not semidefinite and draw(st.booleans()):
            matrix = matrix[::-1]  # has the same singular values
        kind = draw(st.sampled_from([kind for kind in _SINGLE if kind in kinds]))
        operator = _SINGLE[kind](matrix)
        # An operator that is added or composed acts on the same space. lineax 0.1.1 changes
        # the dtype with Python numbers, if both operators are banded, and if one is the
        # identity.
        names = {*kinds} - ({"Add", "Composed"} if kind == "Identity" else set())
        wrappers = [_WRAPPERS[name] for name in _WRAPPERS if name in names]
        second = _SINGLE["PyTree" if kind == "PyTree" else "Function"]
        signs = second(jnp.diag((-1) ** jnp.arange(n)).astype(dtype))
        others = second(matrix), signs, jnp.asarray(3, dtype)
        for _ in range(draw(st.integers(0, depth if wrappers else 0))):
            operator = draw(st.sampled_from(wrappers))(operator, *others)
        dense = operator.as_matrix()
        tags = [None] + [lx.symmetric_tag] * np.array_equal(dense, dense.T)
        tag = lx.positive_semidefinite_tag if semidefinite else draw(st.sampled_from(tags))
        return (lx.TaggedLinearOperator(operator, tag) if tag else operator), dense

    return pairs()


def _hermitian(name: str, n: int, dtype: Any, seed: int) -> Array:
    """Return a Hermitian matrix with this spectrum and random eigenvectors."""
    basis = jax.random.orthogonal(jax.random.key(seed), n, dtype=dtype)
    matrix = (basis * _SPECTRA[name](np.arange(n)[None]).astype(dtype)) @ basis.conj().T
    return (matrix + matrix.conj().T) / 2


def _list_faults(check: str, thing: object, *facts: Facts) -> None:
    """Raise an error that lists each fact `(name, got, want, bound)` whose numbers differ
    by more than `bound`, or whose texts are not equal."""
    faults = []
    for name, got, want, bound in itertools.chain(*facts):
        if isinstance(got, str) and got == want:
            continue
        if isinstance(got, str):  # nothing after it can be compared
            faults.append(f"\n- {name}: must be {want}, but got {got}.")
            break
        error, limits = np.broadcast_arrays(np.abs(np.subtract(got, want)), bound)
        if not np.all(error <= limits):  # NaN is wrong, too
            worst = np.argmax(error - limits)
            off, limit = np.ravel(error)[worst], np.ravel(limits)[worst]
            faults.append(f"\n- {name}: off by {off:.3g}, {limit:.2g} allowed.")
    if faults:
        name = getattr(thing, "__name__", type(thing).__name__)
        raise AssertionError(f"traceax.testing.{check}: {name} fails:{''.join(faults)}")


def _mean(name: str, samples: Any, want: Any, rounding: Any) -> tuple[str, Any, Any, Any]:
    """State that the mean of the samples is `want`, to six standard errors."""
    bound = 6 * np.std(samples, axis=0) / len(samples) ** 0.5 + rounding
    return name, np.mean(samples, axis=0), want, bound


def check_sampler(
    sampler: SamplerLike,
    *,
    independent: bool = True,
    same_for_any_cut: bool = True,
    num_probes: int = 3,
) -> None:
    """Check that a sampler draws probes z with E[z z*] = I.

    It draws 120,000 probes of six dimensions, real and complex, with fixed keys. It checks
    their shapes and dtypes, for arrays and pytrees, and that they depend on the key alone.
    It also checks that E[z z*] = I, that probes are independent, and that they are the same
    however the space is cut into leaves. Means must be correct to within six standard
    errors of the draws.

    **Arguments**

    - `sampler`: a `traceax.Sampler`, or your own function `(key, structure, num_probes) ->
      probes`, as in the guide's conventions.
    - `independent`: whether probes are independent of each other, as most estimators need.
      Default `True`. Pass `False` for `orthogonal`, `hadamard`, `probing` and the like.
    - `same_for_any_cut`: whether a probe stays the same if the space is cut into leaves.
      Default `True`, as for all samplers of traceax. Pass `False` if you draw leaf by leaf.
    - `num_probes`: how many probes to draw at a time. Default 3. For `probing`, pass its
      number of colours.

    **Returns** `None` if the sampler passes.

    **Raises** an `AssertionError` that lists what is wrong, and by how much.

    **Cost**: some seconds.

    **Example**

        >>> import traceax.testing
        >>> traceax.testing.check_sampler(traceax.orthogonal, independent=False)

    **Reference**: Hutchinson (1989),
    [doi:10.1080/03610918908812806](https://doi.org/10.1080/03610918908812806).

    **See also**: `Sampler`, `check_estimator`.
    """
    name, why = "testing.check_sampler", "because one probe cannot show independence"
    sampler = as_sampler(name, sampler)
    num_probes = checks.check_count(name, "num_probes", num_probes, 2, why)
    facts = partial(_sampler_facts, sampler, num_probes, independent, same_for_any_cut)
    _list_faults("check_sampler", sampler, facts("float32"), facts("complex64"))


def _sampler_facts(sampler: Any, k: int, independent: bool, cut: bool, dtype: str) -> Facts:
    n, leaf = 6, partial(jax.ShapeDtypeStruct, dtype=dtype)
    trees = [{"a": leaf((3,)), "b": leaf((3,))}, leaf((n,)), (leaf(()), leaf((5, 1)))]
    keys = jax.random.split(jax.random.key(7), 120_000 // k)
    want = checks.show(jax.tree.map(lambda x: leaf((k, *x.shape)), trees))
    got = checks.show([sampler(keys[0], tree, k) for tree in trees])
    yield f"{dtype}: shapes (num_probes, *leaf.shape), leaf.dtype", got, want, 0

    def columns(key: Any, tree: Any = trees[0]) -> Any:
        return as_columns(sampler(key, tree, k), jnp.dtype(dtype))

    one, again, *others = (columns(keys[0], tree) for tree in [trees[0], *trees])
    yield f"{dtype}: same key, same probes", again, one, 0
    if cut:
        yield f"{dtype}: same_for_any_cut=True", np.stack(others), one, 1e-5
    z = np.asarray(jax.jit(jax.vmap(columns))(keys), np.result_type(dtype, np.float64))
    mean = partial(_mean, rounding=1e-5 * np.max(np.abs(z)) ** 2)
    outer = z @ z.conj().swapaxes(1, 2) / k
    yield mean(f"{dtype}: E[z z*] = I", outer, np.eye(n))
    # Small errors of length and mean show in the trace and the sum of the entries.
    yield mean(f"{dtype}: E|z|^2 = n", np.trace(outer, axis1=1, axis2=2), n)
    yield mean(f"{dtype}: E|sum z_i|^2 = n", np.sum(outer, axis=(1, 2)), n)
    if independent:
        products = np.abs(np.sum(z[:, :, :-1].conj() * z[:, :, 1:], axis=1)) ** 2
        yield mean(f"{dtype}: independent=True, E|z_i* z_j|^2 = n", products, n)
        forms = np.sum(z.conj() * ((np.diag(np.arange(n)) + 0.3) @ z), axis=1).real
        forms -= np.mean(forms, axis=0)
        products = forms[:, :-1] * forms[:, 1:]
        yield mean(f"{dtype}: independent=True, cov(z* B z) = 0", products, 0)


def check_operator(
    operator: lx.AbstractLinearOperator, key: PRNGKeyArray, *, rtol: float | None = None
) -> dict[str, str]:
    """Check that a lineax operator is linear and consistent, and that its tags are true.

    With random vectors it checks that `mv` returns `out_structure` and is linear, over the
    complex numbers if it is complex. It checks that `transpose`, `lx.conj` and `as_matrix`
    agree with `mv`, and that derivatives, forward and reverse, agree with each other and
    with differences. Finally, it checks that everything that lineax says about the
    operator, by a tag or by its class, is true.

    **Arguments**

    - `operator`: any lineax operator. This process must have all of its arrays.
    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `rtol`: the relative error that is still attributed to rounding. Default `None`, which
      is eps^0.6 of the operator's dtype, 4e-10 in double and 7e-5 in single precision.

    **Returns** a dictionary of the functions of lineax that the class, or a class inside a
    sum or product, has not registered. It maps their names to the consequences, and is
    empty for lineax's own classes. lineax itself needs `is_symmetric`,
    `is_positive_semidefinite` and `is_negative_semidefinite` to make an operator. traceax
    needs only `lx.conj`, and only if the operator is complex. If `lx.diagonal` is
    registered, `trace` and `diagonal` use it instead of matvecs.

    **Raises** an `AssertionError` that lists what is wrong, and by how much.

    **Cost**: 110 matvecs.

    **Example**

        >>> import jax, lineax as lx, traceax.testing
        >>> operator = lx.MatrixLinearOperator(jax.numpy.eye(3), lx.unit_diagonal_tag)
        >>> traceax.testing.check_operator(operator, jax.random.key(0))
        {}

    **Reference**: Claerbout (1985), Imaging the Earth's Interior (the test of the adjoint).

    **See also**: `as_operator`, `operators`.
    """
    checks.check_operator("testing.check_operator", operator, square=False)
    checks.check_key("testing.check_operator", key)
    own = jax.tree.map(_of_this_process, operator)
    operator, missing = ops.canonicalise(own), _unregistered(own)
    rtol = ops.LinearMap(operator).eps ** 0.6 if rtol is None else rtol
    _list_faults("check_operator", own, _operator_facts(operator, key, rtol, missing))
    return missing


_FOLLOWS: dict[Any, str] = {
    **dict.fromkeys(questions.TAGS, "it is taken as no"),
    lx.conj: "the operator is taken as its own conjugate, because it is real",
    lx.diagonal: "traces and diagonals take matvecs",
}


def _unregistered(operator: Any) -> dict[str, str]:
    """Return what follows from each function of lineax that a class has not registered."""
    parts = filter(ops.is_silent, jax.tree.leaves(operator, is_leaf=ops.is_silent))
    missing = dict.fromkeys(f for part in parts for f in questions.missing(part))
    return {f.__name__: _FOLLOWS.get(f, "traceax does not ask") for f in missing}


def _of_this_process(leaf: Any) -> Any:
    """Return the array, or the copy of a replicated array that this process has."""
    if getattr(leaf, "is_fully_addressable", True):
        return leaf
    must, got = "hold arrays of one process", f"shape {leaf.shape} spread over several"
    cure = "Gather it by process_allgather(array, tiled=True) of jax's multihost_utils."
    require(leaf.is_fully_replicated, "testing.check_operator", "operator", must, got, cure)
    return leaf.addressable_data(0)


def _image(operator: Any, x: Any) -> Any:
    image = operator.mv(unflatten(x, operator.in_structure()))
    return flatten(image, common_dtype(operator.out_structure()))


def _operator_facts(operator: Any, key: Any, rtol: Any, missing: dict[str, str]) -> Facts:
    into, out = operator.in_structure(), operator.out_structure()
    program, got, _ = eqx.filter_make_jaxpr(operator.mv)(into)
    jax.tree.map(_of_this_process, program.consts)  # also what functions close over
    yield "mv returns out_structure", checks.show(got), checks.show(out), 0
    xs, ys = (as_columns(normal(key, s, 8), common_dtype(s)).T for s in (into, out))
    images = jax.vmap(partial(_image, operator))(xs)
    (x, v, *_), (ax, av, *_), y = xs, images, ys[-1]
    norm, bound = jnp.linalg.norm, rtol * jnp.max(jnp.abs(images))
    a, b = (0.6 - 0.8j, 1.7j) if jnp.iscomplexobj(x) else (0.6, -1.7)
    mixed = _image(operator, (a * x + b * v).astype(x.dtype))
    yield "mv is linear, A(ax + bv) = a Ax + b Av", mixed, a * ax + b * av, 2 * bound
    aty = _image(operator.transpose(), y)
    size = float(norm(ax) * norm(y)) + float(norm(aty) * norm(x))
    yield "transpose is that of mv, y.(Ax) = (A^T y).x", aty @ x, y @ ax, rtol * size
    if "conj" in missing and jnp.iscomplexobj(x):
        yield "lx.conj", "none", "registered, because the operator is complex", 0
    conjugate = _image(lx.conj(operator), x.conj())
    yield "lx.conj is that of mv, conj(A) conj(x) = conj(Ax)", conjugate, ax.conj(), bound
    with suppress(NotImplementedError):  # a class may have no matrix
        image = jnp.matmul(*promoted(operator.as_matrix(), x)) if x.size <= 64 else ax
        yield "as_matrix is that of mv", image, ax, bound

    # Derivatives along a change of the vector and of every array that the operator holds.
    arrays, rest = eqx.partition(operator, eqx.is_inexact_array)
    change = jax.tree.map(lambda a: a * jax.random.normal(key, a.shape, a.dtype), arrays)

    def moved(h: Any) -> Any:
        changed = jax.tree.map(lambda a, d: a + times(h, d).astype(a.dtype), arrays, change)
        return _image(eqx.combine(changed, rest), x + times(h, v))

    zero, h = jnp.zeros((), x.real.dtype), ops.LinearMap(operator).eps ** (1 / 3)
    _, slope = jax.jvp(moved, (zero,), (zero + 1,))
    quotient = (moved(zero + h) - moved(zero - h)) / (2 * h)
    bound = (10 * h + rtol) * jnp.max(jnp.abs(jnp.append(ax, slope)))
    yield "derivative = difference quotient", slope, quotient, bound
    (reverse,) = jax.vjp(moved, zero)[1](y)
    bound = rtol * norm(y) * (norm(ax) + norm(slope))
    yield "reverse derivative = forward derivative", reverse, jnp.sum(y * slope).real, bound
    if eqx.tree_equal(into, out) is True:
        yield from _tag_facts(operator, xs, rtol, missing)


def _tag_facts(operator: Any, xs: Any, rtol: float, missing: dict[str, str]) -> Facts:
    """Compute numbers that are zero if lineax is right, from some columns of the operator
    and from its Ritz values in a small Krylov space. Add to `missing` what is true, but is
    not registered."""
    n, rows = xs.shape[1], jax.vmap(partial(_image, operator))
    places = np.unique(np.linspace(0, n - 1, 32).astype(int))[:, None]
    columns = rows(jnp.asarray(places == np.arange(n), xs.dtype))
    apart = np.arange(n) - places
    images = rows(xs)
    size = jnp.maximum(jnp.max(jnp.abs(images)), jnp.finfo(xs.dtype).tiny)
    blocks = [xs, over(images, size)]
    for _ in range(2):
        blocks.append(over(rows(blocks[-1]), size))
    basis = jnp.linalg.qr(jnp.vstack(blocks).T)[0]
    core = rows(basis.T) @ basis.conj()
    ritz, skew = jnp.linalg.eigvalsh((core + core.conj().T) / 2), core - core.conj().T
    bound = rtol * jnp.maximum(size, jnp.max(jnp.abs(ritz)))
    zeros: dict[Any, Any] = {
        lx.is_symmetric: (images @ xs.T - xs @ images.T) / n,
        lx.is_positive_semidefinite: jnp.append(jnp.minimum(ritz, 0), jnp.abs(skew)),
        lx.is_negative_semidefinite: jnp.append(jnp.maximum(ritz, 0), jnp.abs(skew)),
        lx.is_diagonal: jnp.where(apart != 0, columns, 0),
        lx.is_lower_triangular: jnp.where(apart < 0, columns, 0),
        lx.is_upper_triangular: jnp.where(apart > 0, columns, 0),
        lx.is_tridiagonal: jnp.where(abs(apart) > 1, columns, 0),
        lx.has_unit_diagonal: jnp.where(apart == 0, columns - 1, 0),
    }
    for question, entries in zeros.items():
        name = question.__name__
        if question(operator):
            yield f"lineax.{name} is true", entries, 0, bound
        elif name in missing and jnp.all(jnp.abs(entries) <= bound):
            missing[name] += ", but seems to be true: register it"


def check_estimator(
    estimator: Callable[..., Estimate],
    *,
    num_matvecs: int = 12,
    truth: Callable[[Any], Any] = jnp.trace,
    semidefinite: bool = False,
    euler: bool = True,
    num_keys: int = 400,
) -> None:
    """Check an estimator of the trace, or of anything else that is linear in the operator.

    It uses semidefinite operators of 20 dimensions. It checks, to within six standard
    errors of the runs, that value and derivative have the truth as their mean, and that
    `interval(0.95)` misses the truth in at most 10 % of the runs. It also checks that
    values with an error of 0 are exact, that both modes of differentiation agree, and that
    the result depends on the key alone. The value and error of c A must be c times those of
    A, for c or 1/c the fourth root of the dtype's largest number.

    **Arguments**

    - `estimator`: a function `(operator, key)` or `(operator, key, num_matvecs)`.
    - `num_matvecs`: the budget, if the estimator has an argument of this name. Default 12.
    - `truth`: the quantity as a function of the dense matrix. The default is its trace.
    - `semidefinite`: whether operators are tagged positive semidefinite. Default `False`.
    - `euler`: whether the derivative along the operator is the value. Default `True`.
    - `num_keys`: the number of runs. Default 400. More runs find smaller biases.

    **Returns** `None` if the estimator passes.

    **Raises** an `AssertionError` that lists what is wrong, and by how much.

    **Cost**: some seconds.

    **Example**

        >>> import traceax.testing
        >>> traceax.testing.check_estimator(traceax.hutchinson_trace, num_keys=100)

    **Reference**: none. The identities belong to the rule in `traceax/_core/rule.py`.

    **See also**: `custom_trace`, `check_sampler`.
    """
    name, must = "testing.check_estimator", "be a function (operator, key) -> Estimate"
    got, cure = type(estimator).__name__, "Pass tx.xtrace, for example."
    checks.require_type(callable(estimator), name, "estimator", must, got, cure)
    budgeted = "num_matvecs" in inspect.signature(estimator).parameters
    call = partial(estimator, num_matvecs=num_matvecs) if budgeted else estimator
    tag = lx.positive_semidefinite_tag if semidefinite else ()

    def estimate(matrix: Any, key: Any) -> Any:
        return call(lx.TaggedLinearOperator(_SINGLE["Function"](matrix), tag), key)

    one = _estimate_facts(estimate, truth, num_matvecs if budgeted else np.inf, euler)
    many = _statistics_facts(estimate, truth, num_keys)
    _list_faults("check_estimator", estimator, one, many)


def _problem(name: str, dtype: Any) -> tuple[Array, Array, Array]:
    """Return a matrix, a change of it, and a bound on rounding errors."""
    matrix, change = _hermitian(name, 20, dtype, 3), _hermitian("flat", 20, dtype, 4)
    size = jnp.sum(jnp.abs(matrix) + jnp.abs(change))
    return matrix, change, 300 * jnp.finfo(size.dtype).eps * size


def _estimate_facts(estimate: Any, truth: Any, budget: float, euler: bool) -> Facts:
    matrix, change, bound = _problem("decaying", float)
    key, run, want = jax.random.key(11), jax.jit(estimate), jnp.shape(truth(matrix))
    one = estimate(matrix, key)
    got = [jnp.shape(leaf) for leaf in jax.tree.leaves(one)[:2]]
    got = f"{'Estimate' if isinstance(one, Estimate) else type(one).__name__} of {got}"
    yield "value and standard_error", got, f"Estimate of {[want, want]}", 0
    value, error = one.value, one.standard_error
    spent = one.num_matvecs * bool(jnp.any(error > 0))  # small operators may be exact
    yield f"num_matvecs is at most {budget}", max(spent - budget, 0), 0, 0
    yield "standard_error is at least 0", jnp.minimum(error, 0), 0, 0
    yield "same key, same value", estimate(matrix, key).value, value, 0
    yield "same value when compiled", run(matrix, key).value, value, bound
    power = jnp.finfo(matrix.dtype).maxexp // 4
    for factor in (2.0**-power, 2.0**power):
        scaled = run(factor * matrix, key)
        name = f"{factor:.0e} A divided by {factor:.0e} is that of A"
        yield f"value of {name}", scaled.value / factor, value, bound
        error_bound = bound + 1e-3 * error
        yield f"error of {name}", scaled.standard_error / factor, error, error_bound
    _, slope = jax.jvp(lambda m: estimate(m, key).value, (matrix,), (change,))
    gradient = jax.grad(lambda m: jnp.sum(estimate(m, key).value))(matrix)
    reverse, along = jnp.sum(gradient * change), jnp.sum(gradient * matrix)
    yield "reverse derivative = forward derivative", reverse, jnp.sum(slope), bound
    if euler:
        yield "euler=True, derivative along A = value", along, jnp.sum(value), bound


def _statistics_facts(estimate: Any, truth: Any, num_keys: int) -> Facts:
    @jax.jit
    @partial(jax.vmap, in_axes=(None, None, 0))
    def runs(matrix: Any, change: Any, key: Any) -> Any:
        slope = jax.jvp(lambda m: estimate(m, key).value, (matrix,), (change,))[1]
        return estimate(matrix, key), slope

    keys = jax.random.split(jax.random.key(12), num_keys)
    spectra = ("flat", "decaying", "rank-deficient")
    for name, dtype in itertools.product(spectra, (float, complex)):
        matrix, change, bound = _problem(name, dtype)
        drawn, slopes = runs(matrix, change, keys)
        want, slope = map(np.asarray, jax.jvp(truth, (matrix,), (change,)))
        name, errors = f"{name} {dtype.__name__}", abs(np.asarray(drawn.value) - want)
        yield _mean(f"{name}: value unbiased", drawn.value, want, bound)
        yield _mean(f"{name}: derivative unbiased", slopes, slope, bound)
        exact = errors * np.asarray(drawn.standard_error == 0)
        yield f"{name}: exact where standard_error is 0", exact, 0, bound
        low, _ = eqx.tree_at(lambda e: e.value, drawn, errors).interval(0.95)
        most = 0.1 + 6 * (0.09 / errors.size) ** 0.5
        yield f"{name}: share that interval(0.95) misses", jnp.mean(low > bound), 0, most
