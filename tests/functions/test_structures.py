"""Log-determinants of operators whose structure splits them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.linalg

import traceax as tx
from tests.helpers import close, contains, is_unbiased, over_keys, refused
from tests.matrices import hermitian
from tests.wrappers import PSD, Plain, function

KEY = jax.random.key(0)
N = 150
SPECTRUM = np.linspace(0.1, 1, N) ** 3


class Blocks(Plain):
    diagonal_blocks: Any = ()


class Factors(Plain):
    kronecker_factors: Any = ()


for kind in (Blocks, Factors):
    lx.is_symmetric.register(kind, lambda operator: True)


def blocks_of(*parts: Any) -> Blocks:
    whole = jnp.asarray(scipy.linalg.block_diag(*parts))
    return Blocks(whole, [function(part, PSD) for part in parts])


def factors_of(*parts: Any) -> Factors:
    return Factors(jnp.asarray(np.kron(*parts)), [function(part, PSD) for part in parts])


def log_determinant(matrix: Any, shift: Any = 0.0) -> Any:
    return np.linalg.slogdet(np.asarray(matrix) + shift * np.eye(len(matrix)))[1]


def test_scaled_operators() -> None:
    """The derivative along the factor is exact, and so is a factor of 1e30."""
    matrix = hermitian(SPECTRUM)
    operator, less = function(matrix, PSD), function(-matrix, lx.negative_semidefinite_tag)
    plain, twice = tx.logdet(operator, KEY, 60), N * math.log(2)
    log = N * math.log(1e30)
    for scaled, more in (
        (1e30 * operator, log),
        (operator / 1e30, -log),
        (2.0 * operator, twice),
        (-2.0 * less, twice),
        (-less, 0),
        (operator.T, 0),
    ):
        found = tx.logdet(scaled, KEY, 60)
        close(found.value, plain.value + more, 1e-12)
        close(found.standard_error, plain.standard_error, 1e-12)
    of_scale = lambda c: tx.logdet(c * operator, KEY, 60).value  # noqa: E731
    close(jax.jit(jax.grad(of_scale))(2.0), N / 2, 1e-13)
    assert jnp.isnan(tx.logdet(-2.0 * operator, KEY, 60).value)
    shifted = tx.logdet(2.0 * operator, KEY, 60, shift=0.1)
    truth = np.sum(np.log(2 * SPECTRUM + 0.1))
    assert abs(shifted.value - truth) <= 4 * shifted.standard_error


def test_a_part_keeps_its_error_bar() -> None:
    """A large factor or block next to exact ones, with the same key: one estimate."""
    large, found = hermitian(SPECTRUM + 0.3), []
    for m in (2, 3):
        small = hermitian(np.arange(1.0, m + 1))
        for make, weight, copies in ((factors_of, m, N), (blocks_of, 1, 1)):
            whole = tx.logdet(make(large, small), KEY, 60)
            value = whole.value - copies * log_determinant(small)
            found.append((value / weight, whole.standard_error / weight))
    for one in found:
        close(one, found[0], 1e-12)
    assert abs(found[0][0] - log_determinant(large)) <= 4 * found[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["blocks", "factors"])
def test_intervals_over_keys(kind: str) -> None:
    small, other = hermitian(np.array([1.0, 2, 4])), hermitian(SPECTRUM[::-1] + 1)
    if kind == "blocks":
        operator, shift = blocks_of(hermitian(SPECTRUM), small, other), 0.01
    else:
        operator, shift = factors_of(hermitian(SPECTRUM + 0.3), small), 0.0
    found = over_keys(lambda key: tx.logdet(operator, key, 40, shift=shift), KEY, 200)
    truth = log_determinant(operator.matrix, shift)
    assert jnp.mean(contains(found, truth)) >= 0.9
    assert is_unbiased(found.value, truth, 5.0)
    assert jnp.all(found.num_matvecs <= 40)


def test_exact_parts() -> None:
    """Small blocks and factors are exact, with derivatives; shifts are for blocks."""
    one, two = (hermitian(np.linspace(1, top, 12)) for top in (2, 5))
    apart, product, noise = blocks_of(one, two), factors_of(one, two), np.arange(1.0, 25.0)
    shift = lx.DiagonalLinearOperator(jnp.asarray(noise))

    def scaled(c: Any) -> Any:
        parts = [function(c * one, PSD), function(two, PSD)]
        found = tx.logdet(Factors(product.matrix, parts), KEY)
        return found.value, found

    @jax.jit
    def run() -> Any:
        several = tx.logdet(apart, KEY, 240, shift=jnp.array([0.0, 0.5]))
        others = tx.logdet(apart, KEY, shift=shift), tx.logdet(product, KEY, shift=0.5)
        return several, others, jax.value_and_grad(scaled, has_aux=True)(1.0)

    blocks, others, ((value, factors), gradient) = run()
    close(
        blocks.value, np.stack([log_determinant(apart.matrix, s) for s in (0, 0.5)]), 1e-12
    )
    assert blocks.method == "exact"
    assert jnp.all(blocks.standard_error == 0)
    close(value, log_determinant(product.matrix), 1e-12)
    close(gradient, 144.0, 1e-12)
    assert factors.num_matvecs == 12
    wants = log_determinant(apart.matrix, noise), log_determinant(product.matrix, 0.5)
    close([other.value for other in others], wants, 1e-12)


def test_messages() -> None:
    one, two = jnp.eye(80), jnp.eye(160)
    part = function(one, PSD)
    words = r"operator\.diagonal_blocks=.*add up to 160.*but got 80"
    refused(ValueError, words, tx.logdet, Blocks(two, [part]), KEY)
    words = r"diagonal_blocks=.*lineax operator"
    refused(TypeError, words, tx.logdet, Blocks(one, [one]), KEY)
    words = r"kronecker_factors=.*multiply to 160.*6400"
    refused(ValueError, words, tx.logdet, Factors(two, [part, part]), KEY)
