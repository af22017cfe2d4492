"""Patterns are read once in a call, and equal ones are coloured once for all calls."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.sparse
from jax.experimental.sparse import BCOO, BCSR

import traceax as tx
from tests.helpers import slow
from tests.probes.helpers import grid, laplacian
from traceax._probes import colouring, probing

SIDES, KEY = (11, 8), jax.random.key(4)
GRID = grid(*SIDES)
N = len(GRID)
MATRIX = laplacian(GRID) + 0.5 * np.eye(N)
MEMOS: list[Any] = [colouring.undirected, colouring.graph, probing.probing_of]
COLOURINGS: list[Any] = [colouring.best_colouring, colouring._of_power]

Counts = tuple[int, int, int, int]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Counts]]:
    """How many times places were read, graphs built, colours found and samplers made."""
    reads = []

    def counted(matrix: Any) -> Any:
        reads.append(matrix)
        return entries_of(matrix)

    def total() -> Counts:
        colours = sum(memo.cache_info().misses for memo in COLOURINGS)
        graphs, samplers = (memo.cache_info().misses for memo in MEMOS[1:])
        return len(reads), graphs, colours, samplers

    entries_of = colouring.entries_of
    monkeypatch.setattr(colouring, "entries_of", counted)
    for memo in MEMOS + COLOURINGS:
        memo.cache_clear()
    yield total
    for memo in MEMOS + COLOURINGS:
        memo.cache_clear()


def shuffled(matrix: Any) -> Any:
    """The upper half alone, in another order, each entry in two parts, with other data."""
    rows, columns = np.nonzero(np.triu(matrix))
    order = np.random.default_rng(0).permutation(np.tile(np.arange(rows.size), 2))
    data = np.arange(order.size) + 1.0
    return scipy.sparse.coo_array((data, (rows[order], columns[order])), matrix.shape)


def padded(matrix: Any) -> BCOO:
    return BCOO.fromdense(jnp.asarray(matrix), nse=int(np.count_nonzero(matrix)) + 5)


FORMATS: dict[str, Callable[[Any], Any]] = {
    "SciPy": scipy.sparse.csr_array,
    "BCOO": padded,
    "dense": np.asarray,
    "own": lambda matrix: tx.as_operator(scipy.sparse.csr_array(matrix)),
}
OTHERS = FORMATS | {
    "shuffled": shuffled,
    "csc_matrix": scipy.sparse.csc_matrix,
    "BCSR": lambda m: BCSR.fromdense(jnp.asarray(m), nse=int(np.count_nonzero(m)) + 5),
    "JAX": jnp.asarray,
    "list": lambda matrix: matrix.tolist(),
    "booleans": lambda matrix: matrix != 0,
}
POSITIVE = tx.as_operator(
    lambda v: jnp.asarray(MATRIX) @ v, N, tags=lx.positive_semidefinite_tag
)
CALLS: dict[str, Callable[[Any], Any]] = {
    "trace": lambda p: tx.trace(POSITIVE, KEY, 80, pattern=p),
    "diagonal": lambda p: tx.diagonal(POSITIVE, KEY, 30, pattern=p),
    "logdet": lambda p: tx.logdet(POSITIVE, KEY, 60, num_probes=20, pattern=p),
    "function_trace": lambda p: tx.function_trace(
        POSITIVE, jnp.exp, KEY, 60, num_probes=20, pattern=p
    ),
    "selected_entries": lambda p: tx.selected_entries(POSITIVE, p, KEY, 30),
    "colouring": lambda p: tx.colouring(p, num_colours=30),
    "colouring, power": lambda p: tx.colouring(p, power=2),
    "probing": lambda p: tx.probing(p, num_colours=30),
    "probing, power": lambda p: tx.probing(p, power=2),
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", CALLS)
def test_one_call_does_everything_once_and_the_next_nothing(
    counts: Callable[[], Counts], name: str, kind: str
) -> None:
    """`trace` makes two colourings: a fine one, and a coarse one for what is deflated."""
    pattern = FORMATS[kind](MATRIX)
    CALLS[name](pattern)
    read = 0 if kind == "own" else 1
    colours = 2 if name == "trace" else 1
    samplers = 0 if name.startswith("colouring") else colours
    assert counts() == (read, 1, colours, samplers)
    CALLS[name](pattern)
    assert counts() == (2 * read, 1, colours, samplers)


@pytest.mark.parametrize("name", ["trace", "colouring", slow("logdet"), slow("diagonal")])
def test_equal_patterns_share_and_different_ones_do_not(
    counts: Callable[[], Counts], name: str
) -> None:
    first = CALLS[name](FORMATS["SciPy"](MATRIX))
    once = counts()[1:]
    for kind, of in OTHERS.items():
        found = CALLS[name](of(MATRIX))
        assert counts()[1:] == once, kind
        same = jax.tree.map(np.array_equal, found, first)
        assert all(jax.tree.leaves(same)), kind
    other = MATRIX.copy()
    other[0, 1] = other[1, 0] = 0
    CALLS[name](scipy.sparse.csr_array(other))
    assert counts()[1:] == tuple(2 * count for count in once)
    edge = MATRIX.copy()
    edge[0, -1] = 1
    CALLS[name](scipy.sparse.csr_array(edge))
    assert counts()[1:] == tuple(3 * count for count in once)


def test_sizes_are_a_part_of_patterns(counts: Callable[[], Counts]) -> None:
    """Even if places are the same."""
    for n in (5, 6, 7):
        assert tx.colouring(scipy.sparse.coo_array(([1.0], ([0], [1])), (n, n))).size == n
    assert counts() == (3, 3, 3, 0)


def test_functions_share(counts: Callable[[], Counts]) -> None:
    """And samplers are the same, so compiled programs are."""
    sampler = tx.probing(MATRIX, power=3, num_colours=29)
    tx.diagonal(POSITIVE, KEY, 30, pattern=FORMATS["BCOO"](MATRIX))
    assert tx.probing(shuffled(MATRIX), power=3, num_colours=29) is sampler
    tx.colouring(MATRIX, power=3, num_colours=29)
    assert counts() == (4, 1, 1, 1)


@pytest.mark.slow
def test_traced_calls_share(counts: Callable[[], Counts]) -> None:
    pattern, matrix = scipy.sparse.csr_array(MATRIX), jnp.asarray(MATRIX)

    @jax.jit
    def twice(matrix: Any) -> Any:
        operator = tx.as_operator(lambda v: matrix @ v, N)
        keys = jax.random.split(KEY)
        return [tx.diagonal(operator, key, 30, pattern=pattern).value for key in keys]

    with jax.checking_leaks():
        first, _ = twice(matrix)
    assert counts() == (2, 1, 1, 1)
    operator = tx.as_operator(lambda v: matrix @ v, N)
    value = tx.diagonal(operator, jax.random.split(KEY)[0], 30, pattern=pattern).value
    np.testing.assert_allclose(first, value, rtol=1e-12)
    assert counts() == (3, 1, 1, 1)


@pytest.mark.slow
def test_the_own_pattern_is_not_read(counts: Callable[[], Counts]) -> None:
    """Of an operator that is too large to be factorised; shared with other calls."""
    side = 46
    line = scipy.sparse.csr_array(laplacian(grid(side)) + 0.05 * np.eye(side))
    eye = scipy.sparse.eye_array(side)
    matrix = scipy.sparse.kron(eye, line) + scipy.sparse.kron(line, eye)
    operator = tx.as_operator(matrix, tags=lx.positive_semidefinite_tag)
    for _ in range(2):
        estimate = tx.logdet(operator, KEY, 60, num_probes=20)
        assert "colours" in estimate.method
        assert counts() == (0, 1, 1, 1)
    tx.logdet(operator, KEY, 60, num_probes=20, pattern=matrix)
    assert counts() == (1, 1, 1, 1)


def test_colours_may_be_changed(counts: Callable[[], Counts]) -> None:
    """They are a copy of those that are kept. So are the places of a pattern."""
    pattern = shuffled(MATRIX)
    colours = tx.colouring(pattern)
    kept = colours.copy()
    colours[:] = 0
    np.testing.assert_array_equal(tx.colouring(pattern), kept)
    assert counts() == (2, 1, 1, 0)
    pattern.coords[0][:] = pattern.coords[1][:]
    np.testing.assert_array_equal(tx.colouring(pattern), np.zeros(N))
    assert counts() == (3, 2, 2, 0)


def test_memory_is_bounded(counts: Callable[[], Counts]) -> None:
    for n in range(2, 22):
        tx.probing(np.ones((n, n)))
    assert counts() == (20, 20, 20, 20)
    for memo in MEMOS + COLOURINGS:
        assert memo.cache_info().currsize <= memo.cache_info().maxsize <= 8
