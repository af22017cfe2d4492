"""Error messages name the argument, the least that suffices, and a cure that works."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax.experimental.sparse import BCOO
from scipy.sparse import csr_array, csr_matrix

import traceax
from tests.wrappers import matrix_free

KEY = jax.random.key(3)
N = 300
OPERATOR = matrix_free(lambda v: 2 * v, N)
COLOURS = np.arange(N) % 12
SPACE = jax.ShapeDtypeStruct((5,), float)
COUNTS: dict[str, Any] = {"num_probes": 4, "num_steps": 5}


class Meter:
    """A progress meter, if it is made."""

    def init(self) -> None: ...
    def step(self, state: Any, progress: Any) -> None: ...
    def close(self, state: Any) -> None: ...


a: Any = OPERATOR
tx: Any = traceax  # so that what is wrong may be passed
density: Any = partial(tx.spectral_density, a, key=KEY, **COUNTS)
likelihood: Any = partial(tx.inv_quad_logdet, a, jnp.ones(N), KEY)
interval: Any = tx.Estimate(jnp.asarray(1.0), jnp.asarray(1.0), 10).interval

# The call, the error, and the words of its message.
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "budget None": (lambda: tx.trace(a, KEY, None), TypeError, "got None. Pass a whole"),
    "budget NaN": (lambda: tx.trace(a, KEY, np.nan), TypeError, "got nan. Pass a whole"),
    "a traced one": (
        lambda: jax.jit(lambda k: tx.trace(a, KEY, k))(50),
        TypeError,
        "static_argnames",
    ),
    "tags": (lambda: tx.xnysdiag(a, KEY, 20), ValueError, r"use traceax\.xdiag\."),
    "p = -1": (
        lambda: tx.schatten_norm(a, jnp.asarray(-1.0), KEY, **COUNTS),
        ValueError,
        r"schatten_norm\(p=.*positive",
    ),
    "p = 0 under jit": (
        lambda: jax.jit(lambda: tx.schatten_norm(a, np.float32(0), KEY, **COUNTS).value)(),
        ValueError,
        r"schatten_norm\(p=.*positive.*Pass 1 for the nuclear norm",
    ),
    "width": (
        lambda: density(grid=jnp.linspace(0, 3, 5), width=-1.0),
        ValueError,
        r"spectral_density\(width=.*positive",
    ),
    "width, own grid": (
        lambda: density(grid=None, width=0.0),
        ValueError,
        r"spectral_density\(width=.*positive",
    ),
    "own grid in batches": (
        lambda: density(grid=None, batch_size=2),
        ValueError,
        r"spectral_density\(grid=.*because no batch sees.*Pass jax\.numpy\.linspace",
    ),
    "no width": (lambda: density(grid=jnp.ones(1)), ValueError, r"width=.*None"),
    "sphere, -1": (lambda: tx.sphere(KEY, SPACE, -1), ValueError, "num_probes.*least 1"),
    "a shape": (lambda: tx.normal(KEY, (5,), 2), TypeError, r"normal\(structure=.*got \(5"),
    "integers": (
        lambda: tx.rademacher(KEY, jax.ShapeDtypeStruct((5,), int), 2),
        TypeError,
        r"rademacher\(structure=.*real or complex",
    ),
    "slq, by colours": (
        lambda: tx.slq_trace(a, jnp.exp, KEY, **COUNTS, sampler=tx.probing(COLOURS)),
        ValueError,
        "slq_trace.num_probes=.*must be at least 12, one for each colour",
    ),
    "colours alone": (
        lambda: tx.hutchinson_trace(a, KEY, 20, sampler=COLOURS),
        TypeError,
        r"hutchinson_trace\(sampler=.*got ndarray.*probing\(colours\)",
    ),
    "colours forgotten": (
        lambda: tx.hutchinson_trace(a, KEY, 20, sampler=tx.probing),
        TypeError,
        r"hutchinson_trace\(sampler=.*got traceax.probing itself.*probing\(colours\)",
    ),
    "too few for the colours": (
        lambda: tx.function_diagonal(
            a, jnp.exp, KEY, **COUNTS, sampler=tx.probing(COLOURS)
        ),
        ValueError,
        r"function_diagonal\(num_probes=.*at least 12.*got 4",
    ),
    "shifts in a list": (
        lambda: likelihood(shift=[0.1, 0.2]),
        TypeError,
        "real, a number or an lx.Diagonal.*got",
    ),
    "a list of numbers": (
        lambda: tx.inv_quad_logdet(a, [1.0] * N, KEY),
        ValueError,
        r"vector=.*Make arrays of these shapes",
    ),
    "a class of meters": (
        lambda: tx.hutchinson_trace(a, KEY, 20, batch_size=10, progress_meter=Meter),
        TypeError,
        r"progress_meter=.*got a class. Pass diffrax\.TextProgressMeter\(\)",
    ),
    "level in words": (lambda: interval("0.9"), TypeError, "must be a number.*'0.9'"),
    "level None": (lambda: interval(None), TypeError, "must be a number.*None"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments(case: str) -> None:
    call, error, words = REFUSED[case]
    with pytest.raises(error, match=f"(?s){words}") as caught:
        call()
    assert re.match(r"traceax\.[\w.]+\(\w+=\.\.\.\) must ", str(caught.value))


DENSE = jnp.diag(jnp.arange(1.0, 71.0), 0).at[0, 3].set(2.0)


class Tensor:
    """What the message needs of PyTorch's."""

    __module__, shape = "torch", (70, 70)

    def numpy(self, force: bool) -> np.ndarray:
        assert force
        return np.asarray(DENSE)


@pytest.mark.parametrize(
    "matrix",
    [
        np.asarray(DENSE),
        DENSE,
        np.asarray(DENSE).tolist(),
        csr_array(np.asarray(DENSE)),
        csr_matrix(np.asarray(DENSE)),
        BCOO.fromdense(DENSE),
        Tensor(),
        lambda v: DENSE.astype(v.dtype) @ v,
    ],
    ids=["NumPy", "JAX", "list", "SciPy", "SciPy's matrix", "BCOO", "PyTorch", "function"],
)
def test_the_wrapper_that_a_message_advises_works(matrix: Any) -> None:
    """As it stands, imports included."""
    with pytest.raises(TypeError, match="must be a lineax operator, but got") as caught:
        tx.trace(matrix, KEY)
    (advice,) = re.findall(r"Wrap it: (.*)\.$", str(caught.value))
    *imports, call = advice.split("; ")
    scope: dict[str, Any] = {"a": matrix, "function": matrix, "n": 70}
    exec("\n".join(imports), scope)
    value = tx.trace(eval(call, scope), KEY, 70).value
    assert float(value) == pytest.approx(float(jnp.trace(DENSE)), rel=1e-5)


@pytest.mark.parametrize("shift", [None, [0.1], "0.1"])
def test_shifts_that_are_no_numbers(shift: Any) -> None:
    for call in (tx.logdet, tx.preconditioner, partial(likelihood.func, *likelihood.args)):
        arguments = () if isinstance(call, partial) else (a, KEY)
        with pytest.raises(TypeError, match=r"\(shift=.*must be real.*Pass 0\.0 for none"):
            call(*arguments, shift=shift)


@pytest.mark.parametrize("throw", [True, False])
def test_solvers_that_do_not_converge(throw: bool) -> None:
    """The value and the gradient raise; with `throw=False` only the gradient."""
    matrix = jnp.diag(jnp.linspace(1.0, 100.0, 20)) + 0.1

    def value(scale: Any) -> Any:
        operator = lx.MatrixLinearOperator(scale * matrix, lx.positive_semidefinite_tag)
        solver = lx.CG(1e-10, 1e-10, max_steps=3)
        inverse = lx.invert(operator, solver, throw=throw)
        return tx.hutchinson_trace(inverse, KEY, 2).value

    if throw:
        with pytest.raises(Exception, match="maximum number of solver steps"):
            jax.block_until_ready(value(1.0))
    else:
        assert jnp.isfinite(value(1.0))
    with pytest.raises(Exception, match="maximum number of solver steps"):
        jax.block_until_ready(jax.grad(value)(1.0))
