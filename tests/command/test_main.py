"""`python -m traceax`: the tour, every kind of matrix file, and every way to go wrong."""

import gzip
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp

from traceax.__main__ import main
from traceax._command import memory
from traceax._command.matrix import MatrixError, examine
from traceax._command.memory import Blocks
from traceax._command.table import Row, table
from traceax._tasks.tour import share

_NUMBER = r"-?[\d.]+(?:e[+-]\d+)?"
_ESTIMATE = re.compile(
    rf"^  (?P<name>\w\S*) +(?P<real>{_NUMBER})(?: +(?P<sign>[+-]) +(?P<imag>{_NUMBER})j)? *"
    rf"(?:± (?P<error>{_NUMBER}|inf) +(?P<matvecs>\d+) +(?P<time>[\d.,]+) ms)?$"
)
_GENERAL = ["trace", "hutchinson_trace", "hutchpp_trace", "na_hutchpp_trace", "xtrace"]
_ALL = [*_GENERAL, "xnystrace"]

# Budgets below the n of what is sampled, and above the n of what is exact.
_SAMPLED, _EXACT = ["--num-matvecs", "12"], ["--num-matvecs", "100"]


class Line(NamedTuple):
    value: complex
    error: float
    num_matvecs: int


Run = Callable[..., tuple[str, dict[str, Line]]]


def parse(output: str) -> list[dict[str, Line]]:
    """Every table, as a dictionary from the estimators' names."""
    tables: list[dict[str, Line]] = []
    for line in output.splitlines():
        if line.startswith("  estimator"):
            tables.append({})
        elif match := _ESTIMATE.match(line):
            imag = float((match["sign"] or "") + (match["imag"] or "0"))
            value = complex(float(match["real"]), imag)
            error, matvecs = float(match["error"] or 0), int(match["matvecs"] or 0)
            tables[-1][match["name"]] = Line(value, error, matvecs)
    return tables


def assert_consistent(lines: dict[str, Line]) -> None:
    for line in lines.values():
        assert abs(line.value - lines["exact"].value) <= 6 * line.error + 1e-9


@pytest.fixture(autouse=True)
def precision() -> Iterator[None]:
    """`main` turns double precision on; here it is put back."""
    before = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`main`, with success: what it prints, and the table in it."""

    def run(*argv: object) -> tuple[str, dict[str, Line]]:
        assert main([str(argument) for argument in argv]) == 0
        output = capsys.readouterr()
        assert output.err == ""
        (lines,) = parse(output.out)
        return output.out, lines

    return run


@pytest.fixture
def fail(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`main`, with failure: the one line that it prints to stderr."""

    def fail(*argv: object) -> str:
        assert main([str(argument) for argument in argv]) == 2
        error = capsys.readouterr().err
        assert error.startswith("traceax: error: ")
        assert error.endswith(".\n")
        assert error.count("\n") == 1
        return error

    return fail


def sample(n: int, seed: int = 0) -> sp.csr_array:
    """A sparse matrix of integers with a full diagonal, and no symmetry."""
    rng = np.random.default_rng(seed)
    dense = rng.integers(-4, 5, (n, n)) * (rng.random((n, n)) < 0.2)
    return sp.csr_array(dense + np.diag(np.arange(1, n + 1)))


def write(path: Path, matrix: Any, **keywords: Any) -> Path:
    if path.suffix == ".npz":
        sp.save_npz(path, matrix)
    elif path.suffix == ".npy":
        np.save(path, matrix)
    else:
        scipy.io.mmwrite(path, matrix, **keywords)
    return path


# The tour


@pytest.mark.timeout(300)
def test_tour_as_a_program() -> None:
    """Within minutes where it takes seconds: machines of tests are busy."""
    command = [sys.executable, "-m", "traceax"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as program:
        assert program.stdout is not None
        first = program.stdout.readline()
        waited = time.perf_counter() - start
        output = first + program.stdout.read()
    assert program.returncode == 0
    assert "n = 2642, nnz = 6606, sparse, pattern read as float64" in first
    assert waited < 30
    assert waited < (time.perf_counter() - start) / 2
    for credit in ("Gleich/minnesota", "SuiteSparse Matrix Collection", "CC-BY 4.0"):
        assert credit in output
    assert "three products with A" in output
    assert "after compilation" in output
    check_tour(output)


def check_tour(output: str) -> None:
    """The front door's choice first; what wins, and why another loses."""
    triangles, inverse = parse(output)
    assert list(triangles) == ["trace", "xtrace", "colouring", "exact"]
    assert list(inverse) == ["trace", "trace(pattern=A)", "exact"]
    assert triangles["exact"].value == 53
    assert abs(inverse["exact"].value - 1019.66256) < 1e-4
    for lines in (triangles, inverse):
        assert_consistent(lines)
        assert all(lines[name].num_matvecs == 100 for name in lines if name in _GENERAL)
    spoken = re.findall(r"^   tx\.trace\(operator, key, 100\): (\S+) ± ", output, re.M)
    assert [float(word) for word in spoken] == [
        lines["trace"].value.real for lines in (triangles, inverse)
    ]
    coloured = triangles["colouring"]
    assert abs(coloured.value - 53) < 1e-9
    assert f"wins, {coloured.num_matvecs} matvecs and exact" in output
    assert coloured.num_matvecs <= 36
    assert triangles["trace"].error < triangles["xtrace"].error
    assert "XTrace loses, because the spectrum is flat: the 50 largest of 2642" in output
    assert 0 < inverse["trace(pattern=A)"].error < 1e-3 * inverse["trace"].error
    assert output.index("tx.trace(operator") < output.index("  estimator")


def test_the_share_of_the_largest_eigenvalues_is_what_the_tour_says() -> None:
    a = sample(80)
    graph = sp.csr_array(abs((a + a.T).toarray()).astype(float))
    spectrum = np.sort(np.linalg.eigvalsh(graph.toarray()) ** 6)
    expected = spectrum[-50:].sum() / spectrum.sum()
    assert abs(share(graph) - expected) < 1e-4


def test_wrong_use_of_the_program() -> None:
    command = [sys.executable, "-m", "traceax", "absent.mtx"]
    done = subprocess.run(command, capture_output=True, check=False, encoding="utf-8")
    assert done.returncode == 2
    assert done.stderr.startswith("traceax: error: absent.mtx does not exist. ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_import_leaves_the_precision_alone() -> None:
    code = "import jax, traceax, traceax.__main__; assert not jax.config.jax_enable_x64"
    subprocess.run([sys.executable, "-c", code], check=True)


# Sampled: the matrix enters through its products alone


def test_not_symmetric(tmp_path: Path, run: Run) -> None:
    output, lines = run(write(tmp_path / "a.mtx", sample(60)), *_SAMPLED)
    assert "n = 60" in output
    assert "integer read as float64, not symmetric\n" in output
    assert list(lines) == [*_GENERAL, "exact"]
    assert lines["exact"].value == sample(60).diagonal().sum()
    assert all(lines[name].num_matvecs == 12 for name in _GENERAL[1:])
    assert_consistent(lines)


def test_complex_positive_semidefinite(tmp_path: Path, run: Run) -> None:
    factor = sample(60) + 1j * sample(60, seed=1)
    matrix = factor @ factor.conj().T
    output, lines = run(write(tmp_path / "a.mtx", matrix), *_SAMPLED)
    assert "complex128, Hermitian, positive semidefinite (by its eigenvalues)" in output
    assert list(lines) == [*_ALL, "exact"]
    assert lines["exact"].value == matrix.diagonal().sum()
    assert_consistent(lines)


def test_complex_symmetric_is_not_hermitian(tmp_path: Path, run: Run) -> None:
    matrix = sample(60) + 1j * sample(60, seed=1)
    output, lines = run(write(tmp_path / "a.mtx", matrix + matrix.T), *_SAMPLED)
    assert "complex symmetric, not Hermitian" in output
    assert list(lines) == [*_GENERAL, "exact"]
    assert lines["exact"].value.imag != 0
    assert_consistent(lines)


def test_zero_matrix(tmp_path: Path, run: Run) -> None:
    output, lines = run(write(tmp_path / "a.mtx", sp.csr_array((60, 60))), *_SAMPLED)
    assert "nnz = 0" in output
    assert list(lines) == [*_ALL, "exact"]
    assert all(abs(line.value) + line.error < 1e-15 for line in lines.values())


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_numbers_far_from_one(tmp_path: Path, run: Run, scale: float) -> None:
    path = write(tmp_path / "a.mtx", sample(60) * scale)
    output, lines = run(path, "--num-matvecs", "2")
    shown = int(re.findall(r"times 1e([+-]\d+)", output)[0])
    expected = sample(60).diagonal().sum() * scale / 10.0**shown
    assert abs(lines["exact"].value - expected) < 1e-6
    assert 1 <= expected < 10


def test_budget_leaves_estimators_out(tmp_path: Path, run: Run) -> None:
    path = write(tmp_path / "a.mtx", sp.eye_array(20))
    _, lines = run(path, "--num-matvecs", "1")
    assert list(lines) == ["trace", "hutchinson_trace", "xnystrace", "exact"]
    assert lines["trace"] == (20, 0, 20)
    assert all(lines[name].error == np.inf for name in ("hutchinson_trace", "xnystrace"))


def test_seed_draws_other_probes(tmp_path: Path, run: Run) -> None:
    path = write(tmp_path / "a.mtx", sample(60))
    values = [
        run(path, "--num-matvecs", "2", "--seed", seed)[1]["hutchinson_trace"].value
        for seed in (0, 0, 1)
    ]
    assert values[0] == values[1]
    assert values[0] != values[2]


# Exact: n products give the trace, so every reader is seen to read right


def _hermitian() -> sp.csr_array:
    factor = sample(7) + 1j * sample(7, seed=1)
    return sp.csr_array(factor + factor.conj().T)


_FILES: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "symmetric": ("a.mtx", 0.5 * (sample(7) + sample(7).T), {}, "float64, symmetric, not"),
    "laplacian": (
        "a.mtx",
        sp.csr_array(np.diag(np.full(7, 6.0)) - (1 - np.eye(7))),
        {},
        "positive semidefinite (by its Gershgorin discs)",
    ),
    "not symmetric": ("a.mtx", 0.5 * sample(7), {}, "nnz = 16, sparse, float64, not symm"),
    "dense": ("a.mtx", 0.5 * sample(7).toarray(), {}, "dense, float64, not symmetric"),
    "dense symmetric": (
        "a.mtx",
        np.ones((7, 7)),
        {},
        "dense, float64, symmetric, positive",
    ),
    "dense complex": ("a.mtx", 1j * sample(7).toarray(), {}, "dense, complex128, not Herm"),
    "hermitian": ("a.mtx", _hermitian(), {}, "complex128, Hermitian"),
    "integer": ("a.mtx", sample(7), {}, "integer read as float64"),
    "pattern": (
        "a.mtx",
        abs(sample(7)) > 0,
        {"field": "pattern"},
        "pattern read as float64",
    ),
    "zero": ("a.mtx", sp.csr_array((7, 7)), {}, "nnz = 0, sparse"),
    "1 x 1": ("a.mtx", sp.csr_array([[3.0]]), {}, "n = 1, nnz = 1"),
    "csr": ("a.npz", 0.5 * sample(7), {}, "sparse, float64, not symmetric"),
    "coo": ("a.npz", sample(7).tocoo(), {}, "sparse, int64 read as float64"),
    "csc matrix": ("a.npz", sp.csc_matrix(sample(7)), {}, "sparse, int64 read as float64"),
    "bsr": ("a.npz", sample(7).tobsr(), {}, "sparse, int64 read as float64"),
    "dia": ("a.npz", sample(7).todia(), {}, "sparse, int64 read as float64"),
    "boolean": ("a.npz", sample(7) != 0, {}, "bool read as float64"),
    "single": ("a.npz", sample(7).astype(np.complex64), {}, "complex64 read as complex128"),
    "npy": ("a.npy", sample(7).toarray(), {}, "dense, int64 read as float64"),
    "duplicates": (
        "a.npz",
        sp.coo_array(([1.0, 2.0, 4.0], ([0, 0, 1], [0, 0, 1])), (7, 7)),
        {},
        "nnz = 2",
    ),
}


@pytest.mark.parametrize("name", _FILES)
def test_file(name: str, tmp_path: Path, run: Run) -> None:
    file, matrix, keywords, description = _FILES[name]
    output, lines = run(write(tmp_path / file, matrix, **keywords), *_EXACT)
    assert description in output
    assert "n products give the exact trace" in output
    assert list(lines) in ([*_GENERAL, "exact"], [*_ALL, "exact"])
    assert ("xnystrace" in lines) == ("positive semidefinite (by" in output)
    for line in lines.values():
        assert line == (matrix.diagonal().sum(), 0, line.num_matvecs)
        assert line.num_matvecs in (0, matrix.shape[0])


def test_compressed(tmp_path: Path, run: Run) -> None:
    plain = write(tmp_path / "a.mtx", sample(7))
    compressed = tmp_path / "b.mtx.gz"
    compressed.write_bytes(gzip.compress(plain.read_bytes()))
    _, lines = run(compressed, *_EXACT)
    assert lines["xtrace"].value == sample(7).diagonal().sum()


# What is proven about definiteness


def test_eigenvalues_decide_small_matrices() -> None:
    gram = np.array([[2.0, -3.0], [-3.0, 5.0]])
    assert examine(gram, "").positive == "eigenvalues"
    assert examine(gram - np.diag([0.0, 1.0]), "").positive == ""
    assert examine(np.outer([1, 2, 3], [1, 2, 3.0]), "").positive == "eigenvalues"


def test_large_matrices_are_decided_or_not_known() -> None:
    ones = np.ones(2000)
    path = sp.csr_array(np.diag(ones, 1) + np.diag(ones, -1))
    twice = 2 * sp.eye_array(2001)
    assert examine(sp.csr_array(twice - path), "").positive == "Gershgorin discs"
    heavy = examine(sp.csr_array(twice - 1.5 * path), "float64")
    assert heavy.positive is None
    assert "not known to be positive semidefinite" in heavy.describe()
    assert examine(path, "").positive == ""
    assert examine(sp.csr_array(path - twice), "").positive == ""


# The table


def test_value_shows_as_many_digits_as_its_error() -> None:
    rows = [Row("a", 1019.66304, 0.00051, 100, 1.2345), Row("b", 9.1, 23.4, 100, 0.01)]
    assert list(table(rows, 1019.66256)) == [
        "  estimator   estimate ± standard error   matvecs         time",
        "  a           1019.66304 ± 0.00051            100   1,234.5 ms",
        "  b              9       ± 23                 100      10.0 ms",
        "  exact       1019.66256",
    ]


def test_complex_values_are_aligned() -> None:
    """Both points, the sign between them and the ± stand below each other."""
    rows = [
        Row("a", 1.23 - 4.5j, 0.012, 9, 1),
        Row("b", -1019.66304 + 11.2j, 0.23, 9, 1),
        Row("c", 12.5 - 0.001j, 0.00051, 9, 1),
        Row("d", 3 + 400j, 23.0, 9, 1),
        Row("e", -7 - 2j, 0, 9, 1),
    ]
    lines = list(table(rows, 12.345678 - 234.5j))[1:]
    assert [line[:54].rstrip() for line in lines] == [
        "  a               1.230    -   4.500j   ± 0.012",
        "  b           -1019.66     +  11.20j    ± 0.23",
        "  c              12.50000  -   0.00100j ± 0.00051",
        "  d               3        + 400j       ± 23",
        "  e              -7        -   2j       ± 0",
        "  exact          12.345678 - 234.5j",
    ]
    assert {line.index(" + " if " + " in line else " - ") for line in lines} == {26}
    assert {line.index("±") for line in lines[:-1]} == {40}


# Wrong use: status 2, and one line that names the file, the fault and the cure

_HEADER = "%%MatrixMarket matrix coordinate real general\n"


@pytest.mark.parametrize(
    ("file", "content", "fault"),
    [
        ("a.mtx", b"", "cannot be read as a MatrixMarket file"),
        ("a.mtx", b"a matrix it is not\n1 2 3\n", "cannot be read as a MatrixMarket file"),
        ("a.txt", bytes(range(256)), "cannot be read as a MatrixMarket file"),
        ("a.mtx.gz", b"not compressed", "cannot be read as a MatrixMarket file"),
        ("a.mtx", _HEADER.encode() + b"3 3 5\n1 1 2.0\n", "Truncated file"),
        ("a.mtx", _HEADER.encode() + b"3 3 1\n4 4 2.0\n", "index out of bounds"),
        ("a.mtx", _HEADER.encode() + b"3 3 1\n1 1 x\n", "cannot be read as a Matrix"),
        ("a.mtx", _HEADER.encode() + b"3 3 1\n1 1 nan\n", "must have finite entries"),
        ("a.mtx", _HEADER.encode() + b"3 3 1\n1 1 -inf\n", "must have finite entries"),
        ("a.mtx", _HEADER.encode() + b"3 2 1\n1 1 1\n", "square matrix, because only"),
        ("a.mtx", _HEADER.encode() + b"0 0 0\n", "between 1 and 2^31 - 1 rows, but has 0"),
        ("a.mtx", _HEADER.encode() + b"9999999999 9999999999 0\n", "but has 9999999999"),
        (
            "a.mtx",
            _HEADER.encode() + b"2 2 2\n1 1 1.7e308\n2 2 1.7e308\n",
            "the sum of its diagonal overflows",
        ),
        ("a.npz", b"", "cannot be read as a sparse .npz matrix"),
        ("a.npz", bytes(range(256)), "cannot be read as a sparse .npz matrix"),
    ],
)
def test_bad_file(
    file: str, content: bytes, fault: str, tmp_path: Path, fail: Callable[..., str]
) -> None:
    (tmp_path / file).write_bytes(content)
    error = fail(tmp_path / file)
    assert str(tmp_path / file) in error
    assert fault in error


def test_missing_file_and_directory(tmp_path: Path, fail: Callable[..., str]) -> None:
    assert f"{tmp_path / 'a.mtx'} does not exist. Check" in fail(tmp_path / "a.mtx")
    assert "does not exist" in fail("a" * 5000)
    assert f"{tmp_path} is a directory. Name" in fail(tmp_path)
    assert "not a regular file" in fail("/dev/null")


def test_wrong_npz(tmp_path: Path, fail: Callable[..., str]) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, matrix=np.eye(3))
    assert "does not contain a sparse array or matrix" in fail(path)
    sp.save_npz(path, sp.coo_array(np.ones(3)))
    assert "but its shape is 3. " in fail(path)
    sp.save_npz(path, sp.csr_array(np.ones((3, 4))))
    assert "but its shape is 3 x 4. " in fail(path)
    sp.save_npz(path, sp.csr_array(([np.nan], ([0], [1])), (3, 3)))
    assert "must have finite entries" in fail(path)


def test_npz_with_wrong_indices(tmp_path: Path, fail: Callable[..., str]) -> None:
    matrix = sp.csr_array(np.eye(3))
    matrix.indices[0] = 10**6
    sp.save_npz(tmp_path / "a.npz", matrix)
    assert "cannot be read as a sparse .npz matrix" in fail(tmp_path / "a.npz")


def test_npz_of_text(tmp_path: Path, fail: Callable[..., str]) -> None:
    path, zero, start = tmp_path / "a.npz", np.array([0]), np.array([0, 1])
    compressed = {"format": b"csr", "shape": (1, 1), "indices": zero, "indptr": start}
    np.savez(path, allow_pickle=False, **compressed, data=["x"])
    assert f"{path} must hold numbers, but its entries are of type <U1" in fail(path)


def test_not_enough_memory(tmp_path: Path, fail: Callable[..., str]) -> None:
    path = write(tmp_path / "a.npz", sp.eye_array(10**6).tocsr())
    assert "Lower --num-matvecs." in fail(path, "--num-matvecs", 10**6)


def test_num_matvecs_that_do_not_fit(
    tmp_path: Path, fail: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.npz", sp.eye_array(10**6).tocsr())
    monkeypatch.setattr(memory, "free_memory", lambda: 1e9)
    error = fail(path, "--num-matvecs", 1000)
    assert "about 48.0 GB, for blocks of n x 1000 numbers, n = 1000000" in error
    assert error.endswith("At most 20 fit. Lower --num-matvecs.\n")


def test_dimension_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 4e9)
    with pytest.raises(
        MatrixError, match="blocks of n x 6 numbers, n = 100000000"
    ) as caught:
        Blocks(10**8, 8, num_matvecs=6, fewest=1).check(tmp_path)
    assert "Not even 1 would fit: n is too large for this machine." in str(caught.value)
    assert "--num-matvecs" not in str(caught.value)
    Blocks(10**6, 8, num_matvecs=6, fewest=1).check(tmp_path)


@pytest.mark.parametrize(
    ("place", "num_matvecs", "cure"),
    [
        ("read_matrix", 12, "needs more memory to be read than is free. Take a smaller"),
        ("compiled", 12, "At most 11 fit. Lower --num-matvecs."),
        ("compiled", 1, "Not even 1 would fit: n is too large for this machine."),
    ],
)
def test_memory_that_ran_out_in_spite_of_all(
    place: str,
    num_matvecs: int,
    cure: str,
    tmp_path: Path,
    fail: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_out(*_: object, **__: object) -> None:
        raise MemoryError

    path = write(tmp_path / "a.mtx", sample(60))
    monkeypatch.setattr(f"traceax._tasks.own.{place}", run_out)
    assert cure in fail(path, "--num-matvecs", num_matvecs)


def test_wrong_options(fail: Callable[..., str]) -> None:
    assert "--num-matvecs must be at least 1" in fail("--num-matvecs", 0)
    assert "--num-matvecs must be at least 1" in fail("a.mtx", "--num-matvecs", -3)
    assert "--num-matvecs: invalid int value: 'many'" in fail("--num-matvecs", "many")
    assert "--seed must be between 0 and 2^32 - 1" in fail("--seed", -1)
    assert "unrecognized arguments" in fail("a.mtx", "b.mtx")


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    printed = capsys.readouterr().out
    assert "--num-matvecs" in printed
    for suffix in (".mtx", ".mtx.gz", ".npz", ".npy"):
        assert suffix in printed
