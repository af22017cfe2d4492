"""Operators whose arrays are distributed over devices and processes."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import traceax as tx
from tests.calls import CALLS, MATRIX
from tests.helpers import address, cases, close, nightly, outputs, programs, slow

PAGE = Path(__file__).parent.parent / "notebooks/site/docs/guide/several_machines.md"
PROGRAM = ["-m", "tests.on_devices"]
ROWS, WHOLE = PartitionSpec("devices"), PartitionSpec()


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), ("devices",))


def report(text: str) -> dict[str, Any]:
    return json.loads(text.splitlines()[-1])


def two_processes(folder: Path, *names: str, seconds: int = 100) -> list[Any]:
    port = address().partition(":")[2]
    modes = [[*PROGRAM, "process", index, port, *names] for index in "01"]
    return [report(text) for text in outputs(folder, *modes, seconds=seconds)]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_program_of_the_guide_runs_in_two_processes(tmp_path: Path) -> None:
    """As it stands: a log-determinant, its gradient, and pooled runs."""
    (program,) = programs(PAGE.read_text(), "py")
    (tmp_path / "several.py").write_text(program)
    run = [str(tmp_path / "several.py"), address(), "2"]
    texts = outputs(tmp_path, *([*run, index] for index in "01"))
    one, other = ([x for x in t.splitlines() if not x.startswith("[")] for t in texts)
    assert one == other
    logdet, slopes, pooled = one
    diagonal = 1 + np.arange(40_000) / 40_000
    factor = np.cos(np.outer(np.arange(40_000), [1, 2, 3])) / 200
    gram = np.eye(3) + factor.T @ (factor / diagonal[:, None])
    truth = np.sum(np.log(diagonal)) + np.linalg.slogdet(gram)[1]
    number = r"([\d.]+) ± ([\d.]+) "
    for line, true in ((logdet, truth), (pooled, 1500.0)):
        value, error = map(float, re.match(number, line).groups())  # pyright: ignore
        assert abs(value - true) < 5 * error
    assert slopes.startswith("(40000,) slopes")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_processes_agree_outside_of_jit(tmp_path: Path) -> None:
    """They print, stop and choose alike; a key that differs is an error, but only where
    arrays are spread; writing what is not here says what to do."""
    both = two_processes(tmp_path)
    for seen in both:
        assert seen["shown"] == seen["expected"]
        short, long = (float(seen[k].split()[0]) for k in ("shown", "formatted"))
        assert abs(short - long) < 0.051  # 103.972, 104.0
        assert "[70]" in seen["diagonal"]
        assert "key=...) must be the same in every process" in seen["refused"]
        assert "process_allgather" in seen["written"]
    assert both[0]["alone"] != both[1]["alone"]


# One of each kind, on a million dimensions or on the leaves of a network.
LONG = ["xtrace", "xnysdiag", "logdet", "function_diagonal", "inv_quad_logdet"]
LONG += ["laplacian", "leaf_traces", "deltashift", "xtrace, sphere"]
LONG += [f"network, {name}" for name in ("xtrace", "hutchinson_diagonal", "leaf_traces")]
FEW = ["xtrace", "logdet", "laplacian", "network, leaf_traces"]
SOME = ["xtrace", "xnysdiag", "logdet", "inv_quad_logdet", "leaf_traces"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", [slow(SOME), nightly(list(CALLS))], ids=["some", "all"])
def test_two_processes_agree(names: list[str], tmp_path: Path) -> None:
    """Values and gradients of public functions, with the same in one process."""
    first, second = two_processes(tmp_path, *names, seconds=600)
    seen = {**first, **second}
    assert seen.keys() == set(names)
    # Of derivatives that are rounding, the rule takes roots.
    assert seen.pop("spectral_density", 0) < 1e-7
    assert max(seen.values()) < 1e-9, seen


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("devices", "names"), [slow(8, FEW), nightly(8, LONG), nightly(32, LONG)]
)
def test_each_device_needs_a_few_shares_of_a_block(
    devices: int, names: list[str], tmp_path: Path
) -> None:
    """No draw, basis or join is whole on a device, and nothing n-long is moved, be the
    operator's space an array or the leaves of a network that are cut by rows."""
    mode = [*PROGRAM, "memory", str(devices), *names]
    found = report(outputs(tmp_path, mode, seconds=400)[0])
    assert found.keys() == set(names)
    for name, needs in found.items():
        assert needs["shares"] < 8, (name, needs)
        assert needs["moved"] < 1_000_000 / devices, (name, needs)


TRACES = ["xtrace", "logdet", "slq_trace"]
OTHERS = ["hutchinson_trace", "hutchinson_diagonal", "xnystrace", "xdiag"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("names", [slow(TRACES), nightly(OTHERS)], ids=["traces", "others"])
def test_blocks_stay_distributed(names: list[str], tmp_path: Path) -> None:
    """On eight devices only small matrices, k x k, are gathered or summed; the memory of
    each device is a fraction; values and gradients are those of one device."""
    found = report(outputs(tmp_path, [*PROGRAM, "mesh", *names])[0])
    gathered = found.pop("qr")  # a QR factorisation gathers the block
    assert gathered["moved"]["all-gather"] == gathered["block"]
    for name, seen in found.items():
        assert max(seen["moved"].values()) < gathered["n"], name
        assert seen["memory"] < 0.5, name
        assert seen["difference"] < 1e-11, name
        assert seen["sharded"], name


INSIDE = ("xtrace", "diagpp", "logdet", "vecchia", "Jacobian", "function", "gauss_newton")


def rest(name: str) -> Any:
    return (slow if name in INSIDE else nightly)(name)


@pytest.mark.parametrize("name", cases(CALLS, "divergence", rest=rest))
def test_inside_of_shard_map(name: str) -> None:
    """Values and gradients are those outside. (One device has the types of many.)"""
    matrix, key = jnp.asarray(MATRIX), jax.random.key(0)

    def run(matrix: jax.Array, key: jax.Array) -> Any:
        leaves = jax.tree.leaves(CALLS[name](matrix, key).value)
        return jnp.stack([jnp.sum(jnp.real(leaf)) for leaf in leaves]).sum(keepdims=True)

    how: Any = {"mesh": mesh(), "check_vma": False}
    inside = jax.shard_map(run, in_specs=(ROWS, WHOLE), out_specs=ROWS, **how)
    both = (jax.jit(jax.value_and_grad(lambda m, f=f: f(m, key)[0])) for f in (inside, run))
    (value, gradient), (expected, exact) = (f(matrix) for f in both)
    close(value, expected, 1e-10)
    tolerance = 1e-9 * np.max(np.abs(exact))
    np.testing.assert_allclose(gradient, exact, rtol=1e-7, atol=tolerance)


def squares(p: jax.Array, args: Any = None) -> jax.Array:
    return jnp.sum(jnp.tanh(p @ p) ** 2) + jnp.prod(p) + jnp.linalg.norm(p)


def as_hessian(p: jax.Array) -> lx.AbstractLinearOperator:
    """As the page says: lineax's own conversion of closures fails inside a mesh."""
    how: Any = {"tags": lx.symmetric_tag, "closure_convert": False}
    return lx.JacobianLinearOperator(jax.grad(squares), 1 * p, **how)


def as_gauss_newton(p: jax.Array) -> lx.AbstractLinearOperator:
    outputs, loss = lambda p, args: jnp.tanh(p @ p), lambda o, args: jnp.sum(o**2)
    return tx.gauss_newton(outputs, loss, p)


def as_function(p: jax.Array) -> lx.AbstractLinearOperator:
    return tx.as_operator(lambda v: p**2 * v, p, tags=lx.positive_semidefinite_tag)


def traced(operator: Any, key: Any) -> tx.Estimate:
    return tx.hutchinson_trace(operator, key, 8)


POINTS: dict[str, Any] = {
    "divergence": lambda p, key: tx.divergence(lambda p, args: jnp.sin(p @ p), p, key, 4),
    "biharmonic": lambda p, key: tx.biharmonic(squares, p, key, 4),
    "Jacobian": lambda p, key: traced(as_hessian(p), key),
    "function": lambda p, key: traced(as_function(p), key),
    "gauss_newton": lambda p, key: traced(as_gauss_newton(p), key),
}
for name, fn in (("laplacian", tx.laplacian), ("diagonal", tx.hessian_diagonal)):
    for k in (8, 10, 16):
        POINTS[f"{name}, {k}"] = lambda p, key, f=fn, k=k: f(squares, p, key, k)


@pytest.mark.parametrize("name", [rest(name) for name in POINTS])
def test_points_inside_of_shard_map(name: str) -> None:
    """Closed over, whole, or cut; in `pmap` too, and checked for what varies, too."""
    point = jnp.cos(jnp.arange(16.0)).reshape(4, 4)
    keys = jax.random.split(jax.random.key(0), 1)

    def run(key: Any, p: jax.Array = point) -> jax.Array:
        return jnp.sum(POINTS[name](p, key).value)

    want = jax.jit(run)(keys[0])
    close(jax.pmap(run)(keys)[0], want, 1e-10)
    listed = name in ("Jacobian", "function", "gauss_newton")  # on the page
    for check, cut in ((False, False), (False, True), (True, False), (True, True)):
        if check and (name == "gauss_newton" or (listed and not cut)):
            continue
        how: Any = {"mesh": mesh(), "out_specs": ROWS, "check_vma": check}
        if not cut:
            closed = jax.shard_map(lambda k: run(k[0])[None], in_specs=ROWS, **how)
            close(jax.jit(closed)(keys)[0], want, 1e-10)
        given = lambda k, p: run(k[0], p)[None]  # noqa: E731
        inside = jax.shard_map(given, in_specs=(ROWS, ROWS if cut else WHOLE), **how)
        close(jax.jit(inside)(keys, point)[0], want, 1e-10)
