"""Progress meters of functions that take batches."""

from collections.abc import Callable
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import lineax as lx
import pytest

import traceax as tx
from tests.helpers import cases, close, function, general, leaks_checked

KEY = jax.random.key(8)
N = 12
MATRIX = general(N) @ general(N).T
METER = diffrax.TextProgressMeter(minimum_increase=0.0)


def operator(scale: Any = 1.0) -> lx.AbstractLinearOperator:
    return lx.TaggedLinearOperator(
        function(scale * MATRIX), (lx.symmetric_tag, lx.positive_semidefinite_tag)
    )


def energy(x: Any, scale: Any) -> Any:
    return scale * jnp.sum(jnp.sin(MATRIX @ x))


def field(x: Any, scale: Any) -> Any:
    return scale * jnp.sin(MATRIX @ x)


X = jnp.linspace(-1, 1, N)
HOW = {"num_probes": 7, "num_steps": 3}
CALLS: dict[str, Callable[..., tx.Estimate]] = {
    "hutchinson_trace": lambda s, **o: tx.hutchinson_trace(operator(s), KEY, 7, **o),
    "hutchinson_diagonal": lambda s, **o: tx.hutchinson_diagonal(operator(s), KEY, 7, **o),
    "slq_trace": lambda s, **o: tx.slq_trace(operator(s), jnp.exp, KEY, **HOW, **o),
    "spectral_density": lambda s, **o: tx.spectral_density(
        operator(s), jnp.linspace(0.0, 9.0, 3), KEY, **HOW, **o
    ),
    "divergence": lambda s, **o: tx.divergence(
        field, X, KEY, 7, args=s, sampler=tx.rademacher, **o
    ),
    "laplacian": lambda s, **o: tx.laplacian(
        energy, X, KEY, 7, args=s, sampler=tx.rademacher, **o
    ),
    "biharmonic": lambda s, **o: tx.biharmonic(energy, X, KEY, 7, args=s, **o),
    "hessian_diagonal": lambda s, **o: tx.hessian_diagonal(energy, X, KEY, 7, args=s, **o),
    "exact trace": lambda s, **o: tx.hutchinson_trace(operator(s), KEY, 30, **o),
    "exact diagonal": lambda s, **o: tx.hutchinson_diagonal(operator(s), KEY, 30, **o),
    "exact laplacian": lambda s, **o: tx.laplacian(energy, X, KEY, 30, args=s, **o),
}


QUICK = ("hutchinson_trace", "hutchinson_diagonal", "exact trace")


@pytest.mark.parametrize("name", cases(CALLS, *QUICK))
def test_batches_are_shown_once_and_change_nothing(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Three batches, 3 + 3 + 1 probes or 3 times 4, under `jit` and `grad`. The backward
    pass shows nothing."""

    def value(scale: Any, meter: Any) -> Any:
        estimate = CALLS[name](
            scale, batch_size=4 if "exact" in name else 3, progress_meter=meter
        )
        return jnp.sum(estimate.value)

    with leaks_checked():
        shown, slope = jax.jit(jax.value_and_grad(lambda s: value(s, METER)))(1.0)
        jax.block_until_ready((shown, slope))
    jax.effects_barrier()
    lines = [line for line in capfd.readouterr().out.splitlines() if line.endswith("%")]
    steps = ["33.33%", "66.67%"] if "exact" in name else ["42.86%", "85.71%"]
    assert lines == ["0.00%", *steps, "100.00%"]
    silent, its_slope = jax.jit(jax.value_and_grad(lambda s: value(s, None)))(1.0)
    close(shown, silent, 1e-12)
    close(slope, its_slope, 1e-10, 1 + float(jnp.abs(silent)))


def test_without_batches_nothing_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    tx.hutchinson_trace(operator(), KEY, 7, progress_meter=METER)
    jax.effects_barrier()
    assert "%" not in capfd.readouterr().out


def test_wrong_meters() -> None:
    for call in CALLS.values():
        with pytest.raises(TypeError, match=r"progress_meter=\.\.\.\) must be a progress"):
            call(1.0, batch_size=3, progress_meter=print)
