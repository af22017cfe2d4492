"""Log-determinants of operators whose structure splits them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, contains, is_unbiased, over_keys
from tests.matrices import hermitian
from tests.wrappers import PSD, function

KEY = jax.random.key(0)
N = 150
SPECTRUM = np.linspace(0.1, 1, N) ** 3


class Named(lx.AbstractLinearOperator):
    """A symmetric matrix of which something is known, but no answer to other questions."""

    matrix: Any

    def mv(self, vector: Any) -> Any:
        return self.matrix @ vector

    def as_matrix(self) -> Any:
        return self.matrix

    def transpose(self) -> Any:
        return type(self)(self.matrix.T)

    def in_structure(self) -> Any:
        return jax.ShapeDtypeStruct((len(self.matrix),), self.matrix.dtype)

    out_structure = in_structure


class Blocks(Named):
    diagonal_blocks: Any = ()


class Factors(Named):
    kronecker_factors: Any = ()


for kind in (Blocks, Factors):
    lx.is_symmetric.register(kind, lambda operator: True)


def blocks_of(parts: Any, named: Any = None) -> Blocks:
    operators = [function(part, PSD) for part in parts] if named is None else named
    return Blocks(jax.scipy.linalg.block_diag(*parts), operators)


def factors_of(*parts: Any) -> Factors:
    return Factors(jnp.kron(*parts), [function(part, PSD) for part in parts])


def test_scaled_operators() -> None:
    """The derivative along the factor is exact, and so is a factor of 1e30."""
    matrix = jnp.asarray(hermitian(SPECTRUM))
    plain = tx.logdet(function(matrix, PSD), KEY, 60)
    for scale in (3.0, 1e30):
        scaled = tx.logdet(scale * function(matrix, PSD), KEY, 60)
        close(scaled.value, plain.value + N * math.log(scale), 1e-12)
        close(scaled.standard_error, plain.standard_error, 1e-12)
        divided = tx.logdet(function(matrix, PSD) / scale, KEY, 60)
        close(divided.value, plain.value - N * math.log(scale), 1e-12)
    of_scale = lambda c: tx.logdet(c * function(matrix, PSD), KEY, 60).value  # noqa: E731
    close(jax.jit(jax.value_and_grad(of_scale))(2.0)[1], N / 2, 1e-13)
    negative = function(-matrix, lx.negative_semidefinite_tag)
    close(tx.logdet(-2.0 * negative, KEY, 60).value, plain.value + N * np.log(2), 1e-12)
    close(tx.logdet(-negative, KEY, 60).value, plain.value, 1e-12)
    close(tx.logdet(function(matrix, PSD).T, KEY, 60).value, plain.value, 1e-12)
    assert jnp.isnan(tx.logdet(-2.0 * function(matrix, PSD), KEY, 60).value)
    shifted = tx.logdet(2.0 * function(matrix, PSD), KEY, 60, shift=0.1)
    truth = jnp.sum(jnp.log(2 * SPECTRUM + 0.1))
    assert abs(shifted.value - truth) <= 4 * shifted.standard_error


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["blocks", "factors"])
def test_intervals_over_keys(kind: str) -> None:
    least = 0.0 if kind == "blocks" else 0.3
    large, small = hermitian(SPECTRUM + least), hermitian(np.array([1.0, 2, 4]))
    parts = [jnp.asarray(part) for part in (large, small, hermitian(SPECTRUM[::-1] + 1))]
    shift = 0.01 if kind == "blocks" else 0.0
    operator = blocks_of(parts) if kind == "blocks" else factors_of(*parts[:2])

    def one(key: Any) -> tx.Estimate:
        return tx.logdet(operator, key, 40, shift=shift)

    found = over_keys(one, KEY, 200)
    eye = jnp.eye(len(operator.matrix))
    truth = jnp.linalg.slogdet(operator.matrix + shift * eye)[1]
    assert jnp.mean(contains(found, truth)) >= 0.9
    assert is_unbiased(found.value, truth, 5.0)
    assert jnp.all(found.num_matvecs <= 40)


def test_exact_parts() -> None:
    """Small blocks and factors are exact, with derivatives; shifts are for blocks."""
    one, two = (jnp.asarray(hermitian(np.linspace(1, top, 12))) for top in (2, 5))
    eye = jnp.eye(24)
    blocks = tx.logdet(blocks_of([one, two]), KEY, 240, shift=jnp.array([0.0, 0.5]))
    dense = jax.scipy.linalg.block_diag(one, two)
    truth = [jnp.linalg.slogdet(dense + s * eye)[1] for s in (0.0, 0.5)]
    close(blocks.value, jnp.stack(truth), 1e-12)
    assert blocks.method == "exact"
    assert jnp.all(blocks.standard_error == 0)
    factors = tx.logdet(factors_of(one, two), KEY)
    close(factors.value, jnp.linalg.slogdet(jnp.kron(one, two))[1], 1e-12)
    assert factors.num_matvecs == 12
    slope = jax.grad(lambda c: tx.logdet(factors_of(c * one, two), KEY).value)(2.0)
    close(slope, 144 / 2, 1e-12)
    shift = lx.DiagonalLinearOperator(jnp.arange(1.0, 25.0))
    found = tx.logdet(blocks_of([one, two]), KEY, shift=shift)
    close(found.value, jnp.linalg.slogdet(dense + jnp.diag(shift.diagonal))[1], 1e-12)
    shifted = tx.logdet(factors_of(one, two), KEY, shift=0.5)
    truth = jnp.linalg.slogdet(jnp.kron(one, two) + 0.5 * jnp.eye(144))[1]
    close(shifted.value, truth, 1e-12)


def test_messages() -> None:
    one: Any = jnp.eye(80)
    wrong = blocks_of([one, one], named=[function(one, PSD)])
    words = r"operator\.diagonal_blocks=.*add up to 160.*but got 80"
    refusal: Any = ValueError
    rejected_in(refusal, words, wrong)
    rejected_in(TypeError, r"diagonal_blocks=.*lineax operator", blocks_of([one], [one]))
    factors = Factors(jnp.eye(160), [function(one, PSD)] * 2)
    rejected_in(refusal, r"kronecker_factors=.*multiply to 160.*6400", factors)


def rejected_in(kind: Any, words: str, operator: Any) -> None:
    with pytest.raises(kind, match=words):
        tx.logdet(operator, KEY)
