"""Error messages name the argument, the least that suffices, and a cure that works."""

import inspect
import re
from fractions import Fraction
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import lineax as lx
import numpy as np
import pytest
from scipy.sparse import csr_matrix
from scipy.sparse.linalg import aslinearoperator

import traceax
from tests.helpers import refused, slow
from tests.wrappers import PSD, matrix_free
from traceax._core.checks import check_callable

KEY = jax.random.key(3)
N = 300
OPERATOR = matrix_free(lambda v: 2 * v, N)
COLOURS = np.arange(N) % 12
SPACE = jax.ShapeDtypeStruct((5,), float)
COUNTS: dict[str, Any] = {"num_probes": 4, "num_steps": 5}


class Meter:
    """A progress meter, if it is made."""

    init = step = close = print


a: Any = OPERATOR
tx: Any = traceax  # so that what is wrong may be passed
density: Any = partial(tx.spectral_density, a, key=KEY, **COUNTS)
likelihood: Any = partial(tx.inv_quad_logdet, a, jnp.ones(N), KEY)
interval: Any = tx.Estimate(jnp.asarray(1.0), jnp.asarray(1.0), 10).interval


def rejected(kind: type[Exception], words: str, call: Any, *args: Any, **how: Any) -> None:
    """By a message in the form of all messages."""
    form = rf"(?s)^(?=.*{words})traceax\.[\w.]+\(\w+=\.\.\.\) must "
    refused(kind, form, call, *args, **how)


def test_wrong_budgets_and_numbers() -> None:
    value, kind, norm = ValueError, TypeError, partial(tx.schatten_norm, a, **COUNTS)
    positive, words = r"\(p=.*positive", "must be a number"
    traced, grid = jax.jit(lambda k: tx.trace(a, KEY, k)), jnp.linspace(0, 3, 5)
    rejected(kind, "got None. Pass a whole", tx.trace, a, KEY, None)
    rejected(kind, "got nan. Pass a whole", tx.trace, a, KEY, np.nan)
    rejected(kind, "static_argnames", traced, 50)
    rejected(value, r"use traceax\.xdiag\.", tx.xnysdiag, a, KEY, 20)
    rejected(value, f"schatten_norm{positive}", norm, jnp.asarray(-1.0), KEY)
    rejected(kind, r"groups.*first key", tx.leaf_traces, a, KEY, 10, groups="a")
    empty = csr_matrix((N, N))
    rejected(value, "pattern.*stored zeros", tx.selected_entries, a, empty, KEY, 10)
    zero = jax.jit(lambda: norm(np.float32(0), KEY).value)
    rejected(value, f"schatten_norm{positive}.*Pass 1 for the nuclear norm", zero)
    for points, width in ((grid, -1.0), (None, 0.0)):
        rejected(value, r"density\(width=.*positive", density, grid=points, width=width)
    batches = r"density\(grid=.*because no batch sees.*Pass jax\.numpy\.linspace"
    rejected(value, batches, density, grid=None, batch_size=2)
    rejected(value, "width=.*None", density, grid=jnp.ones(1))
    rejected(kind, f"{words}.*'0.9'", interval, "0.9")
    rejected(kind, f"{words}.*None", interval, None)


def test_wrong_samplers_vectors_and_meters() -> None:
    value, kind, trace = ValueError, TypeError, partial(tx.hutchinson_trace, a, KEY, 20)
    integers, by_colours = jax.ShapeDtypeStruct((5,), int), {"sampler": tx.probing(COLOURS)}
    rejected(value, "num_probes.*least 1", tx.sphere, KEY, SPACE, -1)
    rejected(kind, r"normal\(structure=.*got \(5", tx.normal, KEY, (5,), 2)
    rejected(kind, "structure=.*real or complex", tx.rademacher, KEY, integers, 2)
    for call in (tx.slq_trace, tx.function_diagonal):
        words = rf"{call.__name__}\(num_probes=.*must be at least 12, one for each c.*got 4"
        rejected(value, words, call, a, jnp.exp, KEY, **COUNTS, **by_colours)
    words = r"hutchinson_trace\(sampler=.*%s.*probing\(colours\)"
    rejected(kind, words % "got ndarray", trace, sampler=COLOURS)
    # The tests wrap the functions of traceax, and a wrapper takes all arguments.
    for maker in (inspect.unwrap(tx.probing), Fraction, lambda key, structure: structure):
        rejected(kind, words % "take 3 arguments", trace, sampler=maker)
    rejected(kind, r"Sampler\(draw=.*take 3 arguments", tx.Sampler, lambda key: key)
    rejected(kind, r"Sampler\(draw=.*function.*got int", tx.Sampler, 3)
    rejected(kind, "real, a number or an lx.Diagonal.*got", likelihood, shift=[0.1, 0.2])
    words = "vector=.*Make arrays of these shapes"
    rejected(value, words, tx.inv_quad_logdet, a, [1.0] * N, KEY)
    words = r"progress_meter=.*got a class. Pass diffrax\.TextProgressMeter\(\)"
    rejected(kind, words, trace, batch_size=10, progress_meter=Meter)


DENSE = jnp.diag(jnp.arange(1.0, 71.0), 0).at[0, 3].set(2.0)


def test_what_a_message_advises_works() -> None:
    """As it stands."""
    stored = np.asarray(DENSE)
    for matrix in (stored, csr_matrix(stored), lambda v: DENSE.astype(v.dtype) @ v):
        with pytest.raises(TypeError, match="must be a lineax operator, but got") as caught:
            tx.trace(matrix, KEY)
        (advice,) = re.findall(r"Make it one: (.*)\.$", str(caught.value))
        scope: dict[str, Any] = {"a": matrix, "function": matrix, "n": 70, "traceax": tx}
        value = tx.trace(eval(advice, scope), KEY, 70).value
        assert float(value) == pytest.approx(float(jnp.trace(DENSE)), rel=1e-5)


def test_wrong_shifts() -> None:
    """The cures for none and for a pytree work."""
    right = partial(tx.inv_quad_logdet, vector=jnp.ones(N))
    for call in (tx.logdet, tx.preconditioner, right):
        for shift in (None, [0.1], "0.1"):
            words = r"\(shift=.*must be real.*Pass 0\.0 for none"
            rejected(TypeError, words, call, a, key=KEY, shift=shift)
    for call in (tx.logdet, right):
        rejected(ValueError, "shift=.*one number", call, a, key=KEY, shift=jnp.zeros(0))
    tree = {"a": jnp.ones(3), "b": jnp.ones(2)}
    operator = tx.as_operator(lambda v: v, tree)
    words = r"shift=.*lx\.DiagonalLinearOperator\(pytree\)"
    rejected(TypeError, words, tx.logdet, operator, KEY, shift=tree)
    value = tx.logdet(operator, KEY, shift=lx.DiagonalLinearOperator(tree)).value
    assert float(value) == pytest.approx(5 * np.log(2))


@pytest.mark.parametrize("throw", [True, slow(False)])
def test_solvers_that_do_not_converge(throw: bool) -> None:
    """The value and the gradient raise; with `throw=False` only the gradient."""
    matrix = jnp.diag(jnp.linspace(1.0, 100.0, 20)) + 0.1

    def value(scale: Any) -> Any:
        operator = lx.MatrixLinearOperator(scale * matrix, PSD)
        inverse = lx.invert(operator, lx.CG(1e-10, 1e-10, max_steps=3), throw=throw)
        return tx.hutchinson_trace(inverse, KEY, 2).value

    def run(fn: Any) -> Any:
        return jax.block_until_ready(fn(1.0))

    words = "maximum number of solver steps"
    if throw:
        refused(Exception, words, run, value)
    else:
        assert jnp.isfinite(run(value))
    refused(Exception, words, run, jax.grad(value))


FOREIGN = [
    (np.asarray(DENSE), "ndarray of NumPy"),
    (DENSE, "array of JAX"),
    (csr_matrix(np.eye(3)), "csr_matrix of SciPy"),
    (aslinearoperator(np.eye(3)), "LinearOperator of SciPy"),
]
PATTERNS = [
    (aslinearoperator(np.eye(N)), "square.*LinearOperator of SciPy.*dense or sparse"),
    (OPERATOR, "square.*got FunctionLinearOperator"),
    ([[1, 2], [3]], "rows of one length.*a list of several"),
]


def test_operators_and_patterns_of_other_kinds() -> None:
    for key in (KEY, jax.random.PRNGKey(0)):
        words = r"trace\(operator=.*random key.*The operator comes first"
        rejected(TypeError, words, tx.trace, key, OPERATOR, 50)
    for call in (tx.trace, tx.logdet):
        for matrix, library in FOREIGN:
            words = rf"got \w*{library}\. Make it one: traceax\.as_operator\(a\)"
            rejected(TypeError, words, call, matrix, KEY)
        for pattern, words in PATTERNS:
            words = rf"{call.__name__}\(pattern=.*{words}"
            rejected(ValueError, words, call, a, KEY, 20, pattern=pattern)
    pattern = np.eye(N, k=1).astype(object)
    assert np.array_equal(tx.colouring(pattern), tx.colouring(np.eye(N, k=1)))


@pytest.mark.slow
def test_integers_of_numpy_are_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results hold Python's integers. (Annotations say `int`, and would complain.)"""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    size, few = np.int64(24), np.int32(4)
    run: dict[str, Any] = {"num_probes": few, "num_steps": few}
    estimates = [
        partial(tx.trace, a, KEY, size),
        partial(tx.hutchinson_trace, a, KEY, np.uint8(20), batch_size=few),
        partial(tx.slq_trace, a, jnp.exp, KEY, **run),
        partial(tx.function_trace, a, jnp.exp, KEY, **run),
        partial(tx.logdet, a, KEY, np.int64(12), num_probes=few),
    ]
    # What is spent is known without running.
    counts = [eqx.filter_eval_shape(estimate).num_matvecs for estimate in estimates]
    assert counts == [24, 20, 16, 16, 12]
    assert {type(count) for count in counts} == {int}
    assert int(tx.adaptive_trace(a, KEY, max_matvecs=np.int64(200)).num_matvecs) > 0
    assert tx.sphere(KEY, SPACE, few).shape == (4, 5)
    rejected(TypeError, "must be a Python int.*True", tx.trace, a, KEY, np.bool_(True))
    rejected(TypeError, "must be a Python int.*True", tx.trace, a, KEY, True)


def of_two(x: Any, y: Any) -> Any:
    return x


def of_one(x: Any) -> Any:
    return x @ x


POINT, BOTH = jnp.ones(3), r"fn\(x, args\)"
SHOWN = rf"{BOTH}.*got \(x: Any\) -> Any\. Pass lambda x, args"
WRONG: list[tuple[str, str, Any]] = [
    ("fn", SHOWN, partial(tx.laplacian, of_one, POINT, KEY, 2)),
    ("fn", SHOWN, partial(tx.biharmonic, of_one, POINT, KEY, 2)),
    ("fn", SHOWN, partial(tx.hessian_diagonal, of_one, POINT, KEY, 2)),
    ("fn", BOTH, partial(tx.divergence, of_one, POINT, KEY, 2)),
    ("fn", BOTH, partial(tx.gauss_newton, of_one, of_one, POINT)),
    ("loss", r"loss\(outputs, args\)", partial(tx.gauss_newton, of_two, of_one, POINT)),
    ("fn", BOTH, partial(tx.empirical_fisher, of_one, POINT)),
    ("fn", "", partial(tx.function_trace, a, of_two, KEY)),
    ("fn", "", partial(tx.slq_trace, a, of_two, KEY, **COUNTS)),
    ("fn", "", partial(tx.arnoldi_trace, a, of_two, KEY)),
    ("fn", "", partial(tx.function_diagonal, a, of_two, KEY)),
    ("groups", "", partial(tx.leaf_traces, a, KEY, groups=of_two)),
    ("estimate_fn", "", partial(tx.unbiased_square, of_two, KEY)),
    ("matrix", "", partial(tx.as_operator, of_two, 3)),
    ("algorithm", "", partial(tx.custom_trace, jnp.exp, a, KEY, 4)),
    ("estimate", "", partial(tx.adaptive, jnp.exp, KEY)),
]
FITTING = [jnp.exp, np.abs, float, jax.jit(jnp.exp), jax.vmap(jnp.exp), partial(of_two, 1)]


def test_functions_of_a_wrong_number_of_arguments() -> None:
    for argument, words, call in WRONG:
        words = rf"{call.func.__name__}\({argument}=.*must take \d argument.*{words}"
        rejected(TypeError, words, call)
    for fn in FITTING:  # or it is not known
        check_callable("trace", "fn", fn, "of a scalar", "")
    for fn in (lambda *both: both[0] @ both[0], lambda x, args=None: x @ x):
        tx.laplacian(fn, POINT, KEY, 2)


def test_intervals_of_several_levels() -> None:
    value = {"a": jnp.asarray(1.0), "b": jnp.arange(3.0)}
    estimate = tx.Estimate(value, jax.tree.map(lambda x: x + 1, value), 10, 4.0)
    level = jnp.asarray([[0.5], [0.9]])
    low, high = estimate.interval(level)
    for place in np.ndindex(level.shape):
        one = estimate.interval(float(level[place]))
        several = jax.tree.map(lambda x, at=place: x[at], (low, high))
        assert jax.tree.all(jax.tree.map(lambda x, y: jnp.allclose(x, y), one, several))
    rejected(ValueError, r"interval\(level=.*between", estimate.interval, 2 * level)


def test_estimates_of_numbers_of_python_and_complex_ones() -> None:
    low, _ = tx.Estimate(1, 0.5, 10).interval()
    assert float(low) == pytest.approx(0.02, abs=0.01)
    found = tx.adaptive(lambda _, m: tx.Estimate(1.0, m**-0.5, m), KEY, rtol=0.1)
    assert (found.converged, float(found.value)) == (True, 1.0)
    estimate = tx.Estimate(jnp.asarray(1 + 1j), jnp.asarray(1.0), 10)
    words = r"^traceax\.Estimate\.interval must be asked of a real value"
    refused(TypeError, words, estimate.interval)


def test_a_module_as_a_structure() -> None:
    class Model(eqx.Module):
        weight: jax.Array
        name: str = "batch"

    model, identity = Model(jnp.ones(3)), lambda v: v
    words = r"structure=.*name=str.*eqx\.filter\(module, eqx\.is_inexact_array\)"
    rejected(TypeError, words, tx.as_operator, identity, model)
    rejected(TypeError, "structure=.*vectors", tx.as_operator, identity, {"a": jnp.float32})
    operator = tx.as_operator(identity, eqx.filter(model, eqx.is_inexact_array))
    assert float(tx.trace(operator, KEY).value) == pytest.approx(3.0)
    rejected(ValueError, "matrix=.*one length", tx.as_operator, [[1.0, 2.0], [3.0]])


def test_a_callback_without_vmap() -> None:
    """The message names a layout that works."""

    def doubled(v: Any) -> Any:
        return jax.pure_callback(lambda x: np.asarray(2 * x), v, v)

    refused(NotImplementedError, r"Layout\.LOOP", tx.trace, tx.as_operator(doubled, N), KEY)
    operator = tx.as_operator(doubled, N, tags=tx.Layout.LOOP)
    estimate = tx.hutchinson_trace(operator, KEY, 4)
    assert float(estimate.value) == pytest.approx(2 * N)


MEANT = {"log_det": "logdet", "slogdet": "logdet", "hutchpp": "hutchpp_trace"}
MEANT |= {"hutchinson": "hutchinson_trace", "slq": "slq_trace", "diag": "diagonal"}


def test_names_of_other_libraries() -> None:
    for name, meant in MEANT.items():
        words = rf"attribute '{name}'.*mean.*traceax.{meant}"
        refused(AttributeError, words, getattr, tx, name)
    assert not hasattr(tx, "__wrapped__")
