"""Signatures, as `help` shows them, and the samplers that are defaults in them."""

import copy
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
from tests.tables import SAMPLERS

PUBLIC = {name: x for name, x in vars(tx).items() if callable(x) and name[0] != "_"}
STRUCTURE = jax.ShapeDtypeStruct((5,), jnp.float32)
named = pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)


@pytest.mark.parametrize("name", PUBLIC)
def test_no_default_is_an_address(name: str) -> None:
    shown = str(inspect.signature(PUBLIC[name]))
    assert "0x" not in shown
    assert "<function" not in shown


def test_defaults_show_their_names() -> None:
    parameter = inspect.signature(tx.hutchinson_trace).parameters["sampler"]
    assert parameter.default is tx.rademacher
    assert "sampler: 'SamplerLike' = rademacher" in str(parameter)


@named
def test_samplers_are_like_functions(sampler: Any) -> None:
    name = sampler.__name__
    assert inspect.isroutine(sampler)
    assert list(inspect.signature(sampler).parameters) == ["key", "structure", "num_probes"]
    assert repr(sampler) == sampler.__qualname__ == name
    assert sampler.__module__ == "traceax"
    text = pydoc.plain(pydoc.render_doc(sampler))
    assert f"{name}(key: 'PRNGKeyArray', structure: 'Structure', num_probes: 'int')" in text
    assert "**Reference**" in text


@named
def test_samplers_are_one_object_each(sampler: Any) -> None:
    assert pickle.loads(pickle.dumps(sampler)) is sampler
    assert copy.deepcopy(sampler) is copy.copy(sampler) is sampler
    assert {sampler: 1}[sampler] == 1

    class Holder(eqx.Module):
        default: Any = sampler

    assert Holder().default is sampler


def test_programs_are_compiled_once_for_a_sampler() -> None:
    traced = []

    @eqx.filter_jit
    def run(sampler: Any, key: Any) -> Any:
        traced.append(sampler)
        return sampler(key, STRUCTURE, num_probes=2)

    first = [run(tx.sphere, jax.random.key(seed)) for seed in range(3)]
    assert traced == [tx.sphere]
    run(tx.normal, jax.random.key(0))
    assert len(traced) == 2
    jitted = jax.jit(tx.sphere, static_argnums=(1, 2))
    np.testing.assert_array_equal(jitted(jax.random.key(2), STRUCTURE, 2), first[2])
