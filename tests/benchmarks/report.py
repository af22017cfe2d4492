"""The tables of `tests/benchmarks/README.md`, from the benchmarks' own output.

`python -m tests.benchmarks.report [NAME ...] [--gpytorch PYTHON] [--fastgp PYTHON]`, from
the root of the repository, on a machine that does nothing else; an hour for all. NAME is of
a benchmark, as `accuracy`; all if none. What is not named stays as it stands, with the date
on which it was measured; `accelerator` does so too, unless named, where JAX finds a CPU
alone. PYTHON is an interpreter that has GPyTorch, or fastgp, for likelihoods and fits.
"""

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).with_name("README.md")
PACKAGES = ("jax", "equinox", "lineax", "matfree")
INTRODUCTION = """\
# Benchmarks

Side by side with matfree, GPyTorch and loops by hand: what each benchmark printed,
as `python -m tests.benchmarks.report` wrote it down. Every table names the command that
prints it, the day, versions and machine. Errors and coverage hang on the keys alone;
times on the machine, and of these only ratios mean something elsewhere. Problems are small
enough for the truth to be known, by dense factorisations that are fast there.

What the columns are is said in the first lines of `tests/benchmarks/NAME.py`, for each
NAME after `python -m tests.benchmarks.`. Where it prints an aim, `FAIL` or `!` is beside
what falls short of it, and stays there. They need an extra,
`python -m pip install ".[test,benchmarks]"`.
"""


class Section(NamedTuple):
    """`command` is what stands after `python -m tests.benchmarks.`."""

    title: str
    command: str

    @property
    def name(self) -> str:
        return self.command.split()[0]


SECTIONS = (
    Section("Traces: error and coverage", "accuracy"),
    Section("Diagonals and norms: error and coverage", "diagonals"),
    Section("Sparse inverses: probes that know the graph", "probing"),
    Section("Patterns that cover the operator, and that do not", "patterns"),
    Section("Functions of a matrix: error and coverage", "spectra --keys 100"),
    Section("Functions of a matrix in single precision", "spectra --single --keys 100"),
    Section("Log-determinants of kernels, and their gradients", "functions logdet"),
    Section("Functions of a matrix beside rivals since 2025", "rivals"),
    Section("Noisy matvecs and single precision", "noise"),
    Section("Likelihoods of Gaussian processes", "likelihoods"),
    Section("Likelihoods of Gaussian processes, whitened", "likelihoods --whitened"),
    Section("Whitening by entries", "whitening"),
    Section("One run, many answers, and the weights in densities", "one_run"),
    Section("Preconditioned solves", "solves"),
    Section("Automatic choices against estimators by name", "automatic --keys 40"),
    Section("Traces by choice and by name, budget by spectrum", "choices --keys 100"),
    Section("Fits that start from the last solution", "warm_starts"),
    Section("A kernel that is never stored", "tiles"),
    Section("Sparse operators beside BCOO, BCSR and SciPy", "sparse"),
    Section("Fits beside GPyTorch's and fastgp's", "fits"),
    Section("Pools of runs", "pooling --pools 100"),
    Section("Tolerances and drifts", "stopping --keys 100"),
    Section("Any estimator to a tolerance", "tolerances"),
    Section("Divergences by a sketch and by plain probes", "divergences"),
    Section("Speed, compilation and memory beside matfree", "table"),
    Section("Estimators beside their bare matvecs", "overhead"),
    Section("Losses beside loops by hand", "losses"),
    Section("Compilation, function by function", "compilation"),
    Section("First calls", "first_calls"),
    Section("With the threads of LAPACK and with one", "threads"),
    Section("Memory of many long probes", "memory"),
    Section("On accelerators: float32 against float64, times and memory", "accelerator"),
)


def machine() -> str:
    """In words: "2 cores of an Intel(R) Xeon(R) CPU, 31 GiB"."""
    cores, model, size = os.cpu_count(), platform.machine(), ""
    if Path("/proc/cpuinfo").exists():
        named = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        model = named[1] if named else model
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        size = f", {pages / 2**30:.0f} GiB"
    return f"{cores} cores of {model}{size}"


@cache
def accelerator() -> str:
    """The kind of JAX's device, or nothing if that is a CPU. A process of its own asks,
    because whoever asks keeps the device's memory."""
    asks = "import jax; x = jax.devices()[0]; print(x.platform, x.device_kind, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", asks], stdout=subprocess.PIPE, text=True, check=True
    )
    platform_, kind = done.stdout.splitlines()[-2:]
    return "" if platform_ == "cpu" else kind


def measured(section: Section, options: Sequence[str]) -> str:
    """The section's text: what the benchmark prints, and where and when it did."""
    busy, start = os.getloadavg()[0], time.perf_counter()
    words = [*section.command.split(), *options]
    command = [sys.executable, "-m", f"tests.benchmarks.{words[0]}", *words[1:]]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    minutes = (time.perf_counter() - start) / 60
    device = f", {accelerator()}" if accelerator() else ""
    summary = (import_module(f"tests.benchmarks.{section.name}").__doc__ or "").split(
        "\n\n"
    )[0]
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    return "\n".join(
        [
            f"## {section.title}",
            "",
            " ".join(summary.split()),
            "",
            f"`python -m tests.benchmarks.{section.command}`, {datetime.date.today()},"
            f" {minutes:.0f} min. Python {platform.python_version()}, {versions};"
            f" {machine()}{device}, load {busy:.1f} before.",
            "",
            "```text",
            done.stdout.strip("\n"),
            "```",
            "",
        ]
    )


def sections_of(page: str) -> dict[str, str]:
    """What stands in the page, by title."""
    parts = re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]
    return {
        part.splitlines()[0].removeprefix("## "): part.rstrip() + "\n" for part in parts
    }


def page_of(sections: dict[str, str]) -> str:
    """In the order of `SECTIONS`."""
    known = [sections[section.title] for section in SECTIONS if section.title in sections]
    return "\n".join([INTRODUCTION, *known])


PICTURES = {
    "fits": "Nats per point above the best likelihood against seconds, both on logarithmic "
    "scales, for fits of the data sets diabetes and cube by traceax, GPyTorch and fastgp. "
    "Lower and further left is better.",
    "whitening": "Relative errors of gradients against matvecs, both on logarithmic "
    "scales, for two Matérn kernels with noise 1e-4. With whitening, 30 matvecs have less "
    "error than 240 without.",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--gpytorch", metavar="PYTHON")
    parser.add_argument("--fastgp", metavar="PYTHON")
    chosen = parser.parse_args()
    unknown = set(chosen.names) - {section.name for section in SECTIONS}
    if unknown:
        parser.error(f"NAME must be a benchmark with a section, but got {sorted(unknown)}")
    for section in SECTIONS:
        if chosen.names and section.name not in chosen.names:
            continue
        if section.name == "accelerator" and not (chosen.names or accelerator()):
            continue
        options = []
        for other in ("gpytorch", "fastgp"):
            if section.name in ("likelihoods", "fits") and getattr(chosen, other):
                options += [f"--{other}", getattr(chosen, other)]
        picture = f"{section.name}.svg"
        if section.name in PICTURES:
            options += ["--picture", str(PAGE.with_name(picture))]
        new = measured(section, options)
        if section.name in PICTURES:
            new += f"\n![{PICTURES[section.name]}]({picture})\n"
        old = sections_of(PAGE.read_text()) if PAGE.exists() else {}
        PAGE.write_text(page_of(old | {section.title: new}))
        print(f"{section.title}: written")


if __name__ == "__main__":
    main()
