"""Samplers with properties, and that a key means the same probes everywhere."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import traceax as tx
from tests.helpers import cases, close, given, refused, slow
from tests.matrices import general, hermitian
from tests.wrappers import PSD, function
from traceax._core.keys import BLOCKS, keys_of

KEY = jax.random.key(6)
N = 80
SHIFTED = hermitian(1.0 + np.arange(N) % 5)

Estimator = Callable[..., tx.Estimate]
CASES: dict[str, tuple[int, Estimator]] = {
    "hutchinson_trace": (12, lambda op, s: tx.hutchinson_trace(op, KEY, 12, sampler=s)),
    "hutchinson_diagonal": (9, lambda op, s: tx.hutchinson_diagonal(op, KEY, 9, sampler=s)),
    "xtrace": (6, lambda op, s: tx.xtrace(op, KEY, 12, sampler=s)),
    "xnystrace": (8, lambda op, s: tx.xnystrace(op, KEY, 8, sampler=s)),
    "xdiag": (6, lambda op, s: tx.xdiag(op, KEY, 12, sampler=s)),
    "xnysdiag": (8, lambda op, s: tx.xnysdiag(op, KEY, 8, sampler=s)),
    "row_norms_squared": (6, lambda op, s: tx.row_norms_squared(op, KEY, 12, sampler=s)),
    "slq_trace": (
        5,
        lambda op, s: tx.slq_trace(op, jnp.exp, KEY, num_probes=5, num_steps=4, sampler=s),
    ),
    "function_diagonal": (
        5,
        lambda op, s: tx.function_diagonal(
            op, jnp.exp, KEY, num_probes=5, num_steps=4, sampler=s
        ),
    ),
    "control_variate_trace": (
        7,
        lambda op, s: tx.control_variate_trace(
            op, op, KEY, 7, control_trace=1.0, sampler=s
        ),
    ),
}


@pytest.mark.parametrize("name", cases(CASES, "hutchinson_trace", "xtrace"))
def test_a_key_and_a_sampler_mean_the_same_probes_everywhere(name: str) -> None:
    """Those that the sampler draws when it is called."""
    count, estimator = CASES[name]
    operator = function(SHIFTED, PSD)
    probes = tx.rademacher(KEY, operator.in_structure(), count)
    got, want = (estimator(operator, s) for s in (tx.rademacher, given(probes)))
    close(got.value, want.value, 1e-12)
    close(got.standard_error, want.standard_error, 1e-9)


SAMPLERS = [
    (tx.rademacher, 2, 0.0),
    (tx.normal, 2, 0.0),
    (tx.sphere, 2, 0.0),
    (tx.probing(np.arange(5) % 3), 2, 0.0),
    (tx.hadamard, 1, 0.0),
    (tx.orthogonal, 1, 1e-5),  # the numbers of a basis are rounded
]


@pytest.mark.parametrize(("sampler", "fewest", "tolerance"), SAMPLERS, ids=repr)
@pytest.mark.parametrize("dtype", [jnp.float32, slow(jnp.complex64)])
def test_whether_probes_depend_on_their_number(
    sampler: tx.Sampler, fewest: int, tolerance: float, dtype: Any
) -> None:
    """The first ones do not, from so many samples on. A single one is different."""
    structure = jax.ShapeDtypeStruct((5,), dtype)
    many = sampler(KEY, structure, 4 * sampler.group)
    for count in (1, 2, 3):
        few = sampler(KEY, structure, count * sampler.group)
        same = jnp.max(jnp.abs(few - many[: few.shape[0]])) <= tolerance
        assert bool(same) == (count >= fewest)


@pytest.mark.parametrize("sampler", [tx.rademacher, tx.normal, tx.sphere], ids=repr)
@pytest.mark.parametrize("dtype", [jnp.float32, complex])
def test_probes_do_not_depend_on_how_many_there_are_in_a_batch(
    sampler: Any, dtype: Any
) -> None:
    """Each has a key of its own."""
    structure = jax.ShapeDtypeStruct((50,), dtype)
    whole = sampler(KEY, structure, 6)
    each = [sampler(key, structure, 1)[0] for key in keys_of(KEY, 6)]
    close(whole, jnp.stack(each), 1e-6 if dtype is jnp.float32 else 1e-12)


def mirrored(key: Any, structure: Any, num_probes: int) -> Any:
    return -tx.sphere(key, structure, num_probes)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, float, complex])
def test_a_rotation_invariant_sampler_is_resphered(dtype: Any) -> None:
    """So multiples of I are exact; with a plain function they are not."""
    operator = function(3 * jnp.eye(N, dtype=dtype), PSD)
    sampler = tx.Sampler(mirrored, rotation_invariant=True)
    for estimator in (tx.xtrace, tx.xnystrace, tx.hutchpp_trace):
        got = estimator(operator, KEY, 12, sampler=sampler)
        close(got.value, 3.0 * N, 1e-5)
        plain = estimator(operator, KEY, 12, sampler=mirrored)
        assert abs(plain.value - 3 * N) > 0.1
        assert plain.standard_error > 1


def test_an_independent_sampler_is_drawn_in_batches() -> None:
    sizes = []

    def draw(key: Any, structure: Any, num_probes: int) -> Any:
        sizes.append(num_probes)
        return 2.0 * tx.rademacher(key, structure, num_probes)

    operator = function(general(N))
    sampler = tx.Sampler(draw, independent=True)
    whole = tx.hutchinson_trace(operator, KEY, 9, sampler=sampler)
    batched = tx.hutchinson_trace(operator, KEY, 9, sampler=sampler, batch_size=4)
    close(batched.value, whole.value, 1e-12)
    close(whole.value, 4 * tx.hutchinson_trace(operator, KEY, 9).value, 1e-12)
    assert set(sizes) == {1}


def test_properties_of_a_population_are_used() -> None:
    """All probes that there are: nothing is left to chance, and dependence is refused."""
    sampler = tx.Sampler(tx.orthogonal.draw, population=lambda n: n)
    operator = function(general(N))
    got = tx.hutchinson_trace(operator, KEY, N - 1, sampler=sampler)
    same = tx.hutchinson_trace(operator, KEY, N - 1, sampler=tx.orthogonal)
    close(got.standard_error, same.standard_error, 1e-9)
    refused(ValueError, "independent probes", tx.xtrace, operator, KEY, 9, sampler=sampler)


def test_partial_functions_of_samplers_are_samplers() -> None:
    operator = function(general(N))
    for sampler in (functools.partial(tx.sphere), functools.partial(mirrored)):
        got = tx.hutchinson_trace(operator, KEY, 9, sampler=sampler)
        close(
            got.value, tx.hutchinson_trace(operator, KEY, 9, sampler=tx.sphere).value, 1e-9
        )
    maker = inspect.unwrap(tx.probing)
    refused(TypeError, "take 3 arguments", tx.xtrace, operator, KEY, 9, sampler=maker)
    refused(TypeError, "sampler=.*function", tx.xtrace, operator, KEY, 9, sampler=3)


# Keys of samples and blocks.


def test_keys_of_samples_are_all_different() -> None:
    """For 16 seeds that follow each other, three blocks and 1,000 samples, and none is a
    key of the user."""
    seeds = [jax.random.key(seed) for seed in range(16)]
    given = {tuple(np.asarray(jax.random.key_data(key)).tolist()) for key in seeds}
    blocks = [block for key in seeds for block in keys_of(key, 3, BLOCKS)]
    words = [jax.random.key_data(keys_of(block, 1000)) for block in [*seeds, *blocks]]
    made = {tuple(row) for block in words for row in np.asarray(block).tolist()}
    assert len(made) == 64 * 1000
    assert not made & given


def test_keys_of_samples_for_raw_keys_and_other_generators() -> None:
    raw = keys_of(jax.random.PRNGKey(3), 5)
    close(raw, jax.random.key_data(keys_of(jax.random.key(3), 5)), 0)
    other = jax.random.key(3, impl="rbg")
    split = jax.random.key_data(jax.random.split(other, 5))
    close(jax.random.key_data(keys_of(other, 5)), split, 0)
