"""Patterns are read once in a call, and equal ones are coloured once for all calls."""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from jax.experimental.sparse import BCOO, BCSR

import traceax as tx
from tests.helpers import nightly, slow
from tests.probes.helpers import grid, laplacian
from tests.wrappers import PSD, function
from traceax._probes import colouring, probing

KEY = jax.random.key(4)
GRID = grid(11, 8)
N = len(GRID)
MATRIX = laplacian(GRID) + 0.5 * np.eye(N)
MEMOS: list[Any] = [colouring.undirected, colouring.graph, probing.probing_of]
COLOURINGS: list[Any] = [colouring.best_colouring, colouring._of_power]

Counts = tuple[int, int, int, int]
Counting = Callable[[], Counts]


def forget() -> None:
    for memo in MEMOS + COLOURINGS:
        memo.cache_clear()


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    """How many times places were read, graphs built, colours found and samplers made."""
    reads, entries_of = [], colouring.entries_of

    def counted(matrix: Any) -> Any:
        reads.append(matrix)
        return entries_of(matrix)

    def total() -> Counts:
        colours = sum(memo.cache_info().misses for memo in COLOURINGS)
        graphs, samplers = (memo.cache_info().misses for memo in MEMOS[1:])
        return len(reads), graphs, colours, samplers

    monkeypatch.setattr(colouring, "entries_of", counted)
    forget()
    yield total
    forget()


def shuffled(matrix: Any) -> Any:
    """The upper half alone, in another order, each entry in two parts, with other data."""
    rows, columns = np.nonzero(np.triu(matrix))
    order = np.random.default_rng(0).permutation(np.tile(np.arange(rows.size), 2))
    data = np.arange(order.size) + 1.0
    return scipy.sparse.coo_array((data, (rows[order], columns[order])), matrix.shape)


STORED = int(np.count_nonzero(MATRIX)) + 5  # with padding
FORMATS: dict[str, Callable[[Any], Any]] = {
    "SciPy": scipy.sparse.csr_array,
    "own": lambda matrix: tx.as_operator(scipy.sparse.csr_array(matrix)),
    "BCOO": lambda matrix: BCOO.fromdense(jnp.asarray(matrix), nse=STORED),
    "dense": np.asarray,
    "shuffled": shuffled,
    "csc_matrix": scipy.sparse.csc_matrix,
    "BCSR": lambda matrix: BCSR.fromdense(jnp.asarray(matrix), nse=STORED),
    "JAX": jnp.asarray,
    "list": lambda matrix: matrix.tolist(),
    "booleans": lambda matrix: matrix != 0,
}
POSITIVE = function(jnp.asarray(MATRIX), PSD)
FEW: dict[str, Any] = {"num_probes": 20}
CALLS: dict[str, Callable[[Any], Any]] = {
    "trace": lambda p: tx.trace(POSITIVE, KEY, 80, pattern=p),
    "diagonal": lambda p: tx.diagonal(POSITIVE, KEY, 30, pattern=p),
    "logdet": lambda p: tx.logdet(POSITIVE, KEY, 60, pattern=p, **FEW),
    "function_trace": lambda p: tx.function_trace(
        POSITIVE, jnp.exp, KEY, 60, pattern=p, **FEW
    ),
    "selected_entries": lambda p: tx.selected_entries(POSITIVE, p, KEY, 30),
    "colouring": lambda p: tx.colouring(p, num_colours=30),
    "colouring, power": lambda p: tx.colouring(p, power=2),
    "probing": lambda p: tx.probing(p, num_colours=30),
    "probing, power": lambda p: tx.probing(p, power=2),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_first_call_does_everything_once(counts: Counting, name: str) -> None:
    """`trace` makes two colourings: a fine one, and a coarse one for what is deflated."""
    colours = 2 if name == "trace" else 1
    samplers = 0 if name.startswith("colouring") else colours
    read, run = 0, CALLS[name]
    traced = lambda pattern: eqx.filter_eval_shape(lambda: run(pattern))  # noqa: E731
    calls = [run, run] if "ing" in name else [traced, run if name == "diagonal" else traced]
    for kind in ("SciPy", "own", "BCOO", "dense")[: 4 if "col" in name else 2]:
        forget()
        pattern = FORMATS[kind](MATRIX)
        for call in calls:
            call(pattern)
            read += kind != "own"
            assert counts() == (read, 1, colours, samplers)


SHARED = ["diagonal", "colouring", slow("trace"), nightly("logdet")]


@pytest.mark.parametrize("name", SHARED)
def test_equal_patterns_share_and_others_do_not(counts: Counting, name: str) -> None:
    first = CALLS[name](FORMATS["SciPy"](MATRIX))
    once = counts()[1:]
    for kind, of in FORMATS.items():
        found = CALLS[name](of(MATRIX))
        assert counts()[1:] == once, kind
        same = jax.tree.map(np.array_equal, found, first)
        assert all(jax.tree.leaves(same)), kind
    other, edge = MATRIX.copy(), MATRIX.copy()
    other[0, 1] = other[1, 0] = 0
    edge[0, -1] = 1
    for number, matrix in ((2, other), (3, edge)):
        CALLS[name](scipy.sparse.csr_array(matrix))
        assert counts()[1:] == tuple(number * count for count in once)


def test_sizes_are_a_part_of_patterns(counts: Counting) -> None:
    """Even if places are the same."""
    for n in (5, 6, 7):
        assert tx.colouring(scipy.sparse.coo_array(([1.0], ([0], [1])), (n, n))).size == n
    assert counts() == (3, 3, 3, 0)


def test_functions_share(counts: Counting) -> None:
    """And samplers are the same, so compiled programs are."""
    sampler = tx.probing(MATRIX, power=3, num_colours=29)
    tx.diagonal(POSITIVE, KEY, 30, pattern=FORMATS["BCOO"](MATRIX))
    assert tx.probing(shuffled(MATRIX), power=3, num_colours=29) is sampler
    tx.colouring(MATRIX, power=3, num_colours=29)
    assert counts() == (4, 1, 1, 1)


@pytest.mark.slow
def test_the_own_pattern_is_not_read(counts: Counting) -> None:
    """Of an operator that is too large to be factorised; shared with other calls."""
    side = 46
    line = scipy.sparse.csr_array(laplacian(grid(side)) + 0.05 * np.eye(side))
    eye = scipy.sparse.eye_array(side)
    matrix = scipy.sparse.kron(eye, line) + scipy.sparse.kron(line, eye)
    operator = tx.as_operator(matrix, tags=PSD)
    for pattern, read in ((None, 0), (None, 0), (matrix, 1)):
        estimate = tx.logdet(operator, KEY, 60, pattern=pattern, **FEW)
        assert "colours" in estimate.method
        assert counts() == (read, 1, 1, 1)


def test_colours_may_be_changed(counts: Counting) -> None:
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


def test_memory_is_bounded(counts: Counting) -> None:
    for n in range(2, 22):
        tx.probing(np.ones((n, n)))
    assert counts() == (20, 20, 20, 20)
    for memo in MEMOS + COLOURINGS:
        assert memo.cache_info().currsize <= memo.cache_info().maxsize <= 8
