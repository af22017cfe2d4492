"""What one has a file for, each option once, beside dense linear algebra."""

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp

import traceax as tx
from traceax.__main__ import main
from traceax._command import spectrum

# Beyond what the front doors answer exactly.
N = 90


@pytest.fixture(autouse=True)
def precision() -> Iterator[None]:
    """`main` turns double precision on; here it is put back."""
    before = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`main`, with success: what it prints."""

    def run(*argv: object) -> str:
        code = main([str(argument) for argument in argv])
        output = capsys.readouterr()
        assert (code, output.err) == (0, "")
        return output.out

    return run


@pytest.fixture
def ask(run: Callable[..., str]) -> Callable[..., dict[str, Any]]:
    """The one JSON object that is printed."""

    def ask(*argv: object) -> dict[str, Any]:
        output = run(*argv, "--json")
        assert output.count("\n") == 1

        def refuse(constant: str) -> None:
            raise AssertionError(constant)

        return json.loads(output, parse_constant=refuse)

    return ask


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


def positive() -> np.ndarray:
    """A path's Laplacian plus I / 2, with a few long edges."""
    matrix = 2.5 * np.eye(N) - np.eye(N, k=1) - np.eye(N, k=-1)
    for i, j in ((3, 50), (20, 80), (41, 66)):
        matrix[[i, j], [i, j]] += 1
        matrix[[i, j], [j, i]] -= 1
    return matrix


def save(path: Path, matrix: np.ndarray) -> Path:
    if path.suffix == ".npy":
        np.save(path, matrix)
    elif path.suffix == ".npz":
        sp.save_npz(path, sp.csr_array(matrix))
    else:
        scipy.io.mmwrite(path, sp.csr_array(matrix))
    return path


def assert_honest(told: dict[str, Any], exact: Any) -> None:
    """`exact` is; each estimate is within six of its errors, which say something."""
    assert told["exact"] == pytest.approx(exact, rel=1e-11)
    for one in (told, *told["estimators"]):
        assert abs(one["value"] - exact) <= 6 * one["standard_error"] + 1e-6 * abs(exact)
        assert one["standard_error"] < 0.3 * abs(exact)
        low, high = one["interval"]
        assert low <= one["value"] <= high
        assert high - low >= 2 * one["standard_error"]


# Tasks


def test_log_determinant(tmp_path: Path, ask: Callable[..., dict[str, Any]]) -> None:
    path = save(tmp_path / "a.mtx", positive())
    told = ask(path, "--logdet", "--shift", 0.7, "--num-matvecs", 60)
    assert_honest(told, np.linalg.slogdet(positive() + 0.7 * np.eye(N))[1])
    assert (told["task"], told["name"]) == ("logdet", "logdet")
    assert [one["name"] for one in told["estimators"]] == ["slq_trace"]
    assert told["standard_error"] > 0
    assert told["num_matvecs"] <= 60
    assert told["matrix"] == {
        "file": str(path),
        "n": N,
        "nnz": np.count_nonzero(positive()),
        "sparse": True,
        "dtype": "float64",
        "hermitian": True,
        "positive_semidefinite": True,
    }


def test_trace_of_the_inverse(tmp_path: Path, ask: Callable[..., dict[str, Any]]) -> None:
    path = save(tmp_path / "a.npz", positive())
    told = ask(path, "--inverse", "--num-matvecs", 40)
    assert_honest(told, np.trace(np.linalg.inv(positive())))
    names = ["hutchinson_trace", "xtrace", "xnystrace"]
    assert [one["name"] for one in told["estimators"]] == names
    assert told["name"] == "trace"
    errors = [one["standard_error"] for one in told["estimators"]]
    assert told["standard_error"] < 0.1 * min(errors)  # It knows the pattern.


@pytest.mark.parametrize("scale", [1e-60, 1e60])
def test_solves_do_not_depend_on_units(
    scale: float, tmp_path: Path, ask: Callable[..., dict[str, Any]]
) -> None:
    path = save(tmp_path / "a.npy", positive() * scale)
    told = ask(path, "--inverse", "--num-matvecs", N)
    exact = np.trace(np.linalg.inv(positive())) / scale
    assert told["value"] == pytest.approx(exact, rel=1e-6)


def test_inverse_of_what_a_shift_makes_definite(
    tmp_path: Path, ask: Callable[..., dict[str, Any]]
) -> None:
    factor = np.random.default_rng(0).standard_normal((N, N, 2)) @ [1, 1j]
    hermitian = factor + factor.conj().T
    path = save(tmp_path / "a.npy", hermitian)
    shift = 1.3 * np.abs(np.linalg.eigvalsh(hermitian)).max()
    told = ask(path, "--inverse", "--shift", shift, "--num-matvecs", 40)
    assert_honest(told, np.trace(np.linalg.inv(hermitian + shift * np.eye(N))).real)


def test_estrada_index(tmp_path: Path, run: Callable[..., str]) -> None:
    path = save(tmp_path / "a.mtx", positive())
    output = run(path, "--estrada", "--num-matvecs", 60)
    rows = re.findall(r"^  (\w+) +([\d.]+) +± ([\d.]+)", output, re.MULTILINE)
    assert [name for name, _, _ in rows] == ["function_trace", "slq_trace"]
    exact = np.exp(np.linalg.eigvalsh(positive())).sum()
    for _, value, error in rows:
        assert abs(float(value) - exact) <= 6 * float(error)
    assert f"  exact            {exact:.4f}"[:24] in output


def test_estrada_index_that_overflows(
    tmp_path: Path, ask: Callable[..., dict[str, Any]], run: Callable[..., str]
) -> None:
    """Of a star with heavy edges: two eigenvalues apart from all others."""
    star = np.zeros((N, N))
    star[0, 1:] = star[1:, 0] = 100
    path = save(tmp_path / "a.npz", star)
    told = ask(path, "--estrada", "--num-matvecs", 60)
    exact = 100 * np.sqrt(N - 1)
    assert told["exact"] == pytest.approx(exact, rel=1e-12)
    assert told["value"] == pytest.approx(exact, rel=1e-6)
    output = run(path, "--estrada", "--num-matvecs", 60)
    assert "log tr exp(A), because the Estrada index itself overflows" in output
    assert f"between about {exact:.6g} and {exact + np.log(N):.6g}" in output


@pytest.mark.parametrize("power", [1, 2, 3.5])
def test_schatten_norm(
    power: float, tmp_path: Path, ask: Callable[..., dict[str, Any]]
) -> None:
    matrix = positive() + np.eye(N, k=2)
    path = save(tmp_path / "a.npz", matrix)
    told = ask(path, "--norm", power, "--num-matvecs", 80)
    singular = np.linalg.svd(matrix, compute_uv=False)
    assert_honest(told, np.sum(singular**power) ** (1 / power))
    assert told["name"] == "schatten_norm"
    assert 0 < told["num_matvecs"] <= 80


def test_diagonal_of_the_inverse(
    tmp_path: Path, run: Callable[..., str], ask: Callable[..., dict[str, Any]]
) -> None:
    path, out = save(tmp_path / "a.npz", positive()), tmp_path / "out.npy"
    output = run(path, "--diagonal", out, "--shift", 0.2, "--num-matvecs", 30)
    diagonal, errors = np.load(out)
    exact = np.diag(np.linalg.inv(positive() + 0.2 * np.eye(N)))
    assert np.mean(np.abs(diagonal - exact) <= 3 * errors) > 0.9
    assert np.linalg.norm(diagonal - exact) < 0.05 * np.linalg.norm(exact)
    assert "diag((A + 0.2 I)^-1) by tx.diagonal: (90,) ± " in output
    assert str(out) in output
    again = ask(path, "--inverse", "--diagonal", out, "--num-matvecs", N)
    assert np.load(out)[0] == pytest.approx(np.diag(np.linalg.inv(positive())), rel=1e-6)
    assert again["relative_error"] < 1e-6
    assert again["output"] == str(out)


def test_diagonal_of_the_exponential(
    tmp_path: Path, ask: Callable[..., dict[str, Any]]
) -> None:
    path, out = save(tmp_path / "a.mtx", positive()), tmp_path / "out.npy"
    told = ask(path, "--diagonal", out, "--estrada", "--num-matvecs", 60)
    diagonal, errors = np.load(out)
    values, vectors = np.linalg.eigh(positive())
    exact = vectors**2 @ np.exp(values)
    assert np.mean(np.abs(diagonal - exact) <= 3 * errors) > 0.9
    deviation = np.linalg.norm(diagonal - exact) / np.linalg.norm(exact)
    assert told["relative_error"] == pytest.approx(deviation)
    assert told["name"] == "function_diagonal"


def test_spectral_density(
    tmp_path: Path, run: Callable[..., str], ask: Callable[..., dict[str, Any]]
) -> None:
    pytest.importorskip("matplotlib")
    path, out = save(tmp_path / "a.mtx", positive()), tmp_path / "out.png"
    told = ask(path, "--density", out, "--num-matvecs", 250)
    assert out.read_bytes().startswith(b"\x89PNG")
    grid, value = np.array(told["grid"]), np.array(told["value"])
    assert np.trapezoid(value, grid) == pytest.approx(1, abs=0.01)
    distances = (grid[:, None] - np.linalg.eigvalsh(positive())) / told["width"]
    peaks = np.exp(-(distances**2) / 2) / (np.sqrt(2 * np.pi) * told["width"])
    exact = peaks.mean(axis=1)
    deviation = np.abs(value - exact).max() / exact.max()
    assert told["relative_error"] == pytest.approx(deviation)
    assert deviation < 0.3
    words = run(path, "--density", tmp_path / "out.svg", "--num-matvecs", 250)
    assert "by tx.spectral_density: (400,) ± " in words
    assert "<svg" in (tmp_path / "out.svg").read_text()


def test_large_matrices_have_no_exact_answer(
    tmp_path: Path, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for room in ("_command.spectrum", "_tasks.functions", "_tasks.diagonals"):
        monkeypatch.setattr(f"traceax.{room}.DENSE", N - 1)
    path = save(tmp_path / "a.npz", positive())
    output = run(path, "--norm", 1, "--num-matvecs", 40)
    assert "exact" not in output
    output = run(path, "--inverse", "--num-matvecs", 2)
    assert "  exact" not in output


def test_ends_of_a_large_spectrum(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = spectrum_of(sp.csr_array(positive()))
    exact = spectrum.ends(matrix)
    monkeypatch.setattr(spectrum, "DENSE", N - 1)
    assert spectrum.ends(matrix) == pytest.approx(exact, rel=1e-4)


def spectrum_of(entries: sp.csr_array) -> Any:
    from traceax._command.matrix import examine  # noqa: PLC0415, beside its only use

    return examine(entries, "float64")


def test_json_of_complex_and_of_one_product(
    tmp_path: Path, ask: Callable[..., dict[str, Any]]
) -> None:
    path = save(tmp_path / "a.npz", positive() * (1 + 2j))
    told = ask(path, "--num-matvecs", 1)
    trace = np.trace(positive())
    assert told["exact"] == {"real": pytest.approx(trace), "imag": pytest.approx(2 * trace)}
    assert set(told["value"]) == {"real", "imag"}
    assert told["standard_error"] is None  # One product cannot tell.
    assert told["interval"] is None


# Standard input


def feed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))


@pytest.mark.parametrize("name", ["a.mtx", "a.npy", "a.npz"])
def test_standard_input(
    name: str,
    tmp_path: Path,
    ask: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feed(monkeypatch, save(tmp_path / name, positive()).read_bytes())
    told = ask("-", "--num-matvecs", N)
    assert told["value"] == pytest.approx(np.trace(positive()))
    assert told["matrix"]["file"] == "standard input"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "standard input cannot be read as a MatrixMarket file"),
        (b"\x93NUMPY", "standard input cannot be read as a .npy array"),
        (b"PK\x03\x04", "standard input cannot be read as a sparse .npz matrix"),
        (b"\x1f\x8b", "standard input cannot be read as a MatrixMarket file"),
    ],
)
def test_wrong_standard_input(
    content: bytes, fault: str, fail: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, content)
    error = fail("-")
    assert fault in error
    assert "/" not in error.split(".")[0]


def test_standard_input_that_is_too_long(
    fail: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traceax._command.stdin.free_memory", lambda: 1e6)
    feed(monkeypatch, b"0" * 2_000_000)
    assert "standard input is longer than what memory is free. Take" in fail("-")


# Wrong use


def test_matrices_that_do_not_fit(tmp_path: Path, fail: Callable[..., str]) -> None:
    general = save(tmp_path / "a.npy", positive() + np.eye(N, k=3))
    out = tmp_path / "out.npy"
    for options in (
        ["--logdet"],
        ["--inverse"],
        ["--estrada"],
        ["--diagonal", out],
    ):
        assert "must be symmetric for --" in fail(general, *options)
    assert not out.exists()


@pytest.mark.parametrize("task", ["--logdet", "--inverse"])
def test_the_cure_for_matrices_that_are_not_definite(
    task: str, tmp_path: Path, fail: Callable[..., str], run: Callable[..., str]
) -> None:
    path = save(tmp_path / "a.npz", positive() - 3 * np.eye(N))
    error = fail(path, task)
    low = np.linalg.eigvalsh(positive() - 3 * np.eye(N))[0]
    assert f"smallest eigenvalue of A is {low:.2g}. Pass --shift" in error
    (shift,) = re.findall(r"Pass --shift ([\d.]+), say", error)
    assert "positive semidefinite" in run(path, task, "--shift", shift)
    assert f"of A - 1 I is {low - 1:.2g}" in fail(path, task, "--shift", -1)


def test_singular_matrices(
    tmp_path: Path, fail: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Semidefinite by Gershgorin; seen by all eigenvalues, or by solves that fail."""
    laplacian = np.diag(np.r_[1, np.full(N - 2, 2.0), 1]) - np.eye(N, k=1) - np.eye(N, k=-1)
    path = save(tmp_path / "a.npz", laplacian)
    assert "must be positive definite for --inverse" in fail(path, "--inverse")
    monkeypatch.setattr(spectrum, "DENSE", N - 1)
    error = fail(path, "--inverse", "--num-matvecs", 4)
    assert "conjugate gradients" in error
    assert "Pass --shift" in error


def test_diagonal_of_an_exponential_that_overflows(
    tmp_path: Path, fail: Callable[..., str]
) -> None:
    path = save(tmp_path / "a.npy", positive() * 1000)
    error = fail(path, "--estrada", "--diagonal", tmp_path / "out.npy")
    assert "must have eigenvalues of at most 700 for the diagonal of exp(A)" in error


def test_no_matplotlib(
    tmp_path: Path, fail: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traceax._tasks.density.find_spec", lambda _: None)
    error = fail("absent.mtx", "--density", tmp_path / "out.png")
    assert "must find matplotlib, which draws the picture, but it is not installed" in error
    assert 'pip install "traceax[notebooks]"' in error


def test_output_that_cannot_be_written(tmp_path: Path, fail: Callable[..., str]) -> None:
    path = save(tmp_path / "a.npy", positive())
    taken = tmp_path / "taken.npy"
    taken.mkdir()
    error = fail(path, "--diagonal", taken, "--num-matvecs", N)
    assert f"{taken} cannot be written (Is a directory)" in error


def test_wrong_options(fail: Callable[..., str], tmp_path: Path) -> None:
    absent = tmp_path / "absent" / "out.npy"
    for argv, fault in (
        (["--logdet"], "a FILE must be named for what is asked for"),
        (["--json"], "a FILE must be named for what is asked for"),
        (["a.mtx", "--logdet", "--inverse"], "not allowed with argument"),
        (["a.mtx", "--shift", 1], "--shift must go with --logdet or --inverse"),
        (["a.mtx", "--shift", "nan", "--logdet"], "--shift must be finite, but got nan"),
        (["a.mtx", "--norm", 0], "--norm must be a positive number, but got 0.0"),
        (["a.mtx", "--norm", "inf"], "--norm must be a positive number, but got inf"),
        (["a.mtx", "--norm", 2, "--num-matvecs", 8], "must be at least 9, the fewest"),
        (["a.mtx", "--logdet", "--num-matvecs", 5], "must be at least 6, the fewest"),
        (["a.mtx", "--diagonal", "a.txt"], "that ends in .npy, but got a.txt. Name a.npy"),
        (
            ["a.mtx", "--density", "a"],
            "ends in .png or .pdf or .svg, but got a. Name a.png",
        ),
        (["a.mtx", "--diagonal", absent], "in a directory that exists, but there is no"),
        (["a.mtx", "--diagonal", "a.npy", "--logdet"], "--diagonal must go with --inverse"),
        (["a.mtx", "--diagonal", "a.npy", "--norm", 2], "--diagonal must go with"),
    ):
        assert fault in fail(*argv)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"traceax {tx.__version__}\n"
