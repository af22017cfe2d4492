"""Samplers with properties, and that a key means the same probes everywhere."""

import copy
import functools
import inspect
import pickle
import pydoc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, given, nightly, refused, slow
from tests.matrices import general, hermitian
from tests.tables import SAMPLERS
from tests.wrappers import PSD, function
from traceax._core.keys import BLOCKS, keys_of
from traceax._probes.draw import for_mean
from traceax._probes.samplers import hadamard_order

KEY = jax.random.key(6)
N = 80
SHIFTED, GENERAL = hermitian(1.0 + np.arange(N) % 5), function(general(N))

# How many probes they draw for 12 matvecs, or for 5 runs of 4 steps.
PROBES = {"hutchinson_trace": 12, "hutchinson_diagonal": 12, "xtrace": 6, "xnystrace": 12}
PROBES |= {"xdiag": 6, "xnysdiag": 12, "row_norms_squared": 6, "control_variate_trace": 12}
PROBES |= {"slq_trace": 5, "function_diagonal": 5}
QUICK, SLOW = ["hutchinson_trace", "xtrace"], ["xdiag", "slq_trace"]
REST = [name for name in PROBES if name not in QUICK + SLOW]


@pytest.mark.parametrize("name", [*QUICK, *map(slow, SLOW), *map(nightly, REST)])
def test_a_key_and_a_sampler_mean_the_same_probes_everywhere(name: str) -> None:
    """The sampler draws them when it is called."""
    operator, args, how = function(SHIFTED, PSD), (), {"num_matvecs": 12}
    if PROBES[name] == 5:
        args, how = (jnp.exp,), {"num_probes": 5, "num_steps": 4}
    if name == "control_variate_trace":
        args, how = (operator,), how | {"control_trace": 1.0}

    def estimate(sampler: Any) -> Any:
        found = getattr(tx, name)(operator, *args, key=KEY, sampler=sampler, **how)
        return found.value, found.standard_error

    probes = tx.rademacher(KEY, operator.in_structure(), PROBES[name])
    got, want = estimate(tx.rademacher), estimate(given(probes))
    close(got[0], want[0], 1e-12)
    close(got[1], want[1], 1e-9)


def test_signs_and_phases_have_modulus_one() -> None:
    space = jax.ShapeDtypeStruct((N,), float)
    assert np.unique(tx.rademacher(KEY, space, 5)).tolist() == [-1, 1]
    space = jax.ShapeDtypeStruct((N,), complex)
    close(abs(tx.rademacher(KEY, space, 5)), np.ones((5, N)), 1e-14)


def drawn(sampler: Any, key: Any, structure: Any, count: int) -> Any:
    return jax.jit(sampler, static_argnums=(1, 2))(key, structure, count)


# How many probes make a sample, and from how many samples on the first ones stay.
PROBING = tx.probing(np.arange(5) % 3)
DEPENDENT = [(PROBING, 3, 2), (tx.hadamard, 1, 1), (tx.orthogonal, 1, 1)]


@pytest.mark.parametrize("dtype", [jnp.float32, nightly(jnp.complex64)])
def test_whether_dependent_probes_depend_on_their_number(dtype: Any) -> None:
    structure = jax.ShapeDtypeStruct((5,), dtype)
    for sampler, group, fewest in DEPENDENT:
        tolerance = 1e-5 if sampler is tx.orthogonal else 0.0  # a basis is rounded
        many = drawn(sampler, KEY, structure, 3 * group)
        for count in (1, 2):
            few = drawn(sampler, KEY, structure, count * group)
            same = jnp.max(jnp.abs(few - many[: few.shape[0]])) <= tolerance
            assert bool(same) == (count >= fewest)


ALONE = [(tx.rademacher, jnp.float32), (tx.rademacher, complex), (tx.sphere, jnp.float32)]
ALONE += [(tx.normal, complex), slow(tx.sphere, complex), nightly(tx.normal, jnp.float32)]


@pytest.mark.parametrize(("sampler", "dtype"), ALONE)
def test_each_independent_probe_has_a_key_of_its_own(sampler: Any, dtype: Any) -> None:
    """So probes do not depend on how many there are, but for a single one."""
    structure = jax.ShapeDtypeStruct((50,), dtype)
    whole, single = (drawn(sampler, KEY, structure, count) for count in (6, 1))
    each = [drawn(sampler, key, structure, 1)[0] for key in keys_of(KEY, 6)]
    close(whole, jnp.stack(each), 1e-6 if dtype is jnp.float32 else 1e-12)
    assert jnp.max(jnp.abs(single[0] - whole[0])) > 0.1


def mirrored(key: Any, structure: Any, num_probes: int) -> Any:
    return -tx.sphere(key, structure, num_probes)


@pytest.mark.parametrize("dtype", [nightly(jnp.float32), nightly(float), nightly(complex)])
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

    operator, sampler = GENERAL, tx.Sampler(draw, independent=True)
    whole = tx.hutchinson_trace(operator, KEY, 9, sampler=sampler)
    batched = tx.hutchinson_trace(operator, KEY, 9, sampler=sampler, batch_size=4)
    close(batched.value, whole.value, 1e-12)
    close(whole.value, 4 * tx.hutchinson_trace(operator, KEY, 9).value, 1e-12)
    assert set(sizes) == {1}


def test_properties_and_partial_functions_of_samplers_are_used() -> None:
    """A population of all probes leaves less to chance, and dependence is refused."""
    sampler, operator = tx.Sampler(tx.orthogonal.draw, population=lambda n: n), GENERAL
    got = tx.hutchinson_trace(operator, KEY, N - 1, sampler=sampler)
    same = tx.hutchinson_trace(operator, KEY, N - 1, sampler=tx.orthogonal)
    close(got.standard_error, same.standard_error, 1e-9)
    refused(ValueError, "independent probes", tx.xtrace, operator, KEY, 9, sampler=sampler)
    want = tx.hutchinson_trace(operator, KEY, 9, sampler=tx.sphere).value
    for sampler in (functools.partial(tx.sphere), functools.partial(mirrored)):
        got = tx.hutchinson_trace(operator, KEY, 9, sampler=sampler).value
        close(got, want, 1e-9)
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
    raw, other = jax.random.PRNGKey(3), jax.random.key(3, impl="rbg")
    close(keys_of(raw, 5), jax.random.key_data(keys_of(jax.random.key(3), 5)), 0)
    got, want = keys_of(other, 5), jax.random.split(other, 5)
    close(jax.random.key_data(got), jax.random.key_data(want), 0)


# Rows of a Hadamard matrix: signs without replacement.


def column(n: int, dtype: Any = float) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((n,), dtype)


def test_all_of_them_are_a_basis() -> None:
    for n in (1, 4, 128):
        assert hadamard_order(n) == n
        probes = np.asarray(tx.hadamard(KEY, column(n), n))
        assert set(np.unique(probes)) <= {-1, 1}
        np.testing.assert_array_equal(probes @ probes.T, n * np.eye(n))


@pytest.mark.parametrize("dtype", [float, complex])
def test_the_sum_over_all_is_the_trace_whatever_the_signs(dtype: Any) -> None:
    """With 32 rows for 30 dimensions. Their modulus is 1, so that diagonals are exact."""
    matrix = np.asarray(general(30, dtype))
    probes = np.asarray(tx.hadamard(KEY, column(30, dtype), hadamard_order(30)))
    close(np.trace(probes.conj() @ matrix @ probes.T) / 32, np.trace(matrix), 1e-12)
    close(np.abs(probes), 1.0, 1e-12)
    assert len(np.unique(probes, axis=0)) == 32


def test_pytrees_are_parts_of_one_draw() -> None:
    structure = {"a": column(5), "b": jax.ShapeDtypeStruct((2, 4), "float32")}
    probes, whole = (tx.hadamard(KEY, space, 7) for space in (structure, column(13)))
    np.testing.assert_array_equal(probes["a"], whole[:, :5])
    np.testing.assert_array_equal(probes["b"].reshape(7, 8), whole[:, 5:])
    assert probes["b"].dtype == jnp.float32


def test_means_use_them_where_they_lower_the_variance() -> None:
    assert for_mean(GENERAL, N // 8 - 1) is tx.rademacher
    assert for_mean(GENERAL, N // 8) is tx.hadamard
    assert for_mean(function(general(1)), 1) is tx.rademacher
    words = r"hadamard\(num_probes=.*at most 16.*got 17"
    refused(ValueError, words, tx.hadamard, KEY, column(13), 17)
    words = r"sampler=.*independent.*got traceax\.hadamard"
    refused(ValueError, words, tx.xtrace, GENERAL, KEY, 10, sampler=tx.hadamard)


# Signatures, as `help` shows them, and the samplers that are defaults in them.

PUBLIC = {name: x for name, x in vars(tx).items() if callable(x) and name[0] != "_"}


def test_defaults_show_their_names() -> None:
    for name, fn in PUBLIC.items():
        shown = str(inspect.signature(fn))
        assert "0x" not in shown, name
        assert "<function" not in shown, name
    parameter = inspect.signature(tx.hutchinson_trace).parameters["sampler"]
    assert parameter.default is tx.rademacher
    assert "sampler: 'SamplerLike' = rademacher" in str(parameter)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_samplers_are_like_functions_and_one_object_each(sampler: Any) -> None:
    name = sampler.__name__
    assert inspect.isroutine(sampler)
    assert list(inspect.signature(sampler).parameters) == ["key", "structure", "num_probes"]
    assert repr(sampler) == sampler.__qualname__ == name
    assert sampler.__module__ == "traceax"
    text = pydoc.plain(pydoc.render_doc(sampler))
    assert f"{name}(key: 'PRNGKeyArray', structure: 'Structure', num_probes: 'int')" in text
    assert "**Reference**" in text
    assert pickle.loads(pickle.dumps(sampler)) is sampler
    assert copy.deepcopy(sampler) is copy.copy(sampler) is {sampler: sampler}[sampler]

    class Holder(eqx.Module):
        default: Any = sampler

    assert Holder().default is sampler


def test_programs_are_compiled_once_for_a_sampler() -> None:
    traced, structure = [], jax.ShapeDtypeStruct((5,), jnp.float32)

    @eqx.filter_jit
    def run(sampler: Any, key: Any) -> Any:
        traced.append(sampler)
        return sampler(key, structure, num_probes=2)

    for sampler, seed in ((tx.sphere, 0), (tx.sphere, 1), (tx.normal, 0)):
        run(sampler, jax.random.key(seed))
    assert traced == [tx.sphere, tx.normal]
