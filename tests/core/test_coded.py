"""What is compiled as one: once for all functions that do the same, and only for those."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import pytest

import traceax as tx
from tests.helpers import close, compilations, slow
from traceax._core.coded import Unknown, algorithm_by_value, coded, coded_operator, static

N, KEY = 70, jax.random.key(0)
SPACE = jax.ShapeDtypeStruct((N,), float)
PSD = lx.positive_semidefinite_tag

COUNTS: dict[str, Any] = {"num_probes": 4, "num_steps": 5}
CALLS = {
    "hutchinson_trace": lambda a, fn: tx.hutchinson_trace(a, KEY, 8),
    "in batches": lambda a, fn: tx.hutchinson_trace(a, KEY, 8, batch_size=3),
    "exact": lambda a, fn: tx.hutchinson_trace(a, KEY, N),
    "xtrace": lambda a, fn: tx.xtrace(a, KEY, 12),
    "xnystrace": lambda a, fn: tx.xnystrace(a, KEY, 12),
    "hutchpp_trace": lambda a, fn: tx.hutchpp_trace(a, KEY, 12),
    "logdet": lambda a, fn: tx.logdet(a, KEY, 40),
    "function_trace": lambda a, fn: tx.function_trace(a, fn, KEY, 40),
    "slq_trace": lambda a, fn: tx.slq_trace(a, fn, KEY, **COUNTS),
    "combined": lambda a, fn: tx.function_trace(a, fn, KEY, 40, combine=squared()),
}


def squared() -> Any:
    weight = jnp.ones(())
    return lambda t: weight * t**2


def made_anew(numbers: Any, power: float) -> tuple[lx.AbstractLinearOperator, Any]:
    """As in a loop of a user's: every function in it is a new one."""

    def step(v: Any, _: Any) -> Any:
        return numbers * v, None

    def apply(v: Any) -> Any:
        return jax.lax.scan(step, v, None, length=2)[0]

    return lx.FunctionLinearOperator(apply, SPACE, PSD), lambda x: x**power


QUICK = ("trace", "diagonal", "slq_trace", "divergence", "deltashift")


@pytest.mark.parametrize("name", [n if n in QUICK else slow(n) for n in CALLS])
def test_functions_made_anew_compile_nothing(name: str) -> None:
    """With other numbers in them, which are seen; another function is another program."""
    first = jnp.linspace(1.0, 2.0, N)
    values = []
    for scale in (1.0, 2.0, 3.0):
        numbers = scale * first
        with compilations() as compiled:
            values.append(CALLS[name](*made_anew(numbers, 0.5)).value)
        if scale > 1:
            assert not compiled
    whole = jax.jit(lambda a: CALLS[name](*made_anew(a, 0.5)).value)(3 * first)
    close(values[2], whole, 1e-11)
    degree = {"logdet": 0.0, "function_trace": 1.0, "slq_trace": 1.0}.get(name, 2.0)
    if degree:
        close(values[2], values[0] * 3**degree, 1e-9)
    if degree == 1.0:
        other = CALLS[name](*made_anew(first, 1.0)).value
        assert abs(other - values[0]) > 1


def test_what_cannot_be_compared_is_applied_as_it_is() -> None:
    """Operators of one's own, functions with effects, arguments that are no arrays."""
    numbers, seen = jnp.linspace(1.0, 2.0, N), []

    class Mine(lx.DiagonalLinearOperator):
        pass

    def heard(v: Any) -> Any:
        jax.debug.callback(lambda: seen.append(1))
        return numbers * v

    mine = lx.TaggedLinearOperator(Mine(numbers), lx.symmetric_tag)
    audible = lx.FunctionLinearOperator(heard, SPACE)
    scaled = lx.JacobianLinearOperator(lambda x, c: c * numbers * x, numbers, 1.0)
    for operator in (mine, audible, scaled):
        with pytest.raises(Unknown):
            coded_operator(operator)
    for operator in (audible, scaled):
        close(tx.xtrace(operator, KEY, N).value, numbers.sum(), 1e-12)
    jax.effects_barrier()
    assert seen


def test_algorithms_that_decide_for_themselves_are_not_compiled() -> None:
    class Method(eqx.Module):
        def run(self, subject: Any, probes: Any) -> None: ...

    name = "closure"
    for algorithm in (Method().run, lambda *_: name, [].append):
        with pytest.raises(Unknown):
            algorithm_by_value(algorithm)


def test_partial_functions_in_static_fields_are_equal_by_their_parts() -> None:
    """Also what is inside of them; what holds arrays has no hash, and stays as it is."""

    def power(x: Any, *, base: Any, exponent: float) -> Any:
        return base(x) ** exponent

    def made(exponent: float) -> Any:
        return static(partial(power, base=partial(divmod, 7), exponent=exponent))

    def times(factor: Any, x: Any) -> Any:
        return factor * x

    assert made(2.0) == made(2.0) != made(3.0)
    assert hash(made(2.0)) == hash(made(2.0))
    assert static(partial(times, 3))(2) == 6
    holding = partial(times, jnp.ones(2))
    assert static(holding) is holding
    assert static(times) is times
    assert static(None) is None


def test_equal_text_is_not_enough() -> None:
    """A constant inside a jitted function is only a name in the text of what calls it."""
    constants = [jnp.full(3, s) for s in (1.0, 2.0)]
    functions = [jax.jit(lambda v, c=c: c * v) for c in constants]
    space = jax.ShapeDtypeStruct((3,), float)
    ones = [coded(lambda v, f=f: f(v), space)(jnp.ones(3)) for f in functions]
    close(ones[1], 2 * ones[0], 1e-15)
