"""The changelog's program for users of traceax 1.0.2 runs and agrees with the one that it
replaces. CI names by TRACEAX_1 the folder that `pip install --no-deps --target FOLDER
traceax==1.0.2` makes."""

import json
import os
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import traceax as tx
from tests.helpers import default_settings, programs, python

ROOT = Path(__file__).parent.parent
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
MIGRATION = CHANGELOG.split("coming from 1.0.2")[1].split("### Changed")[0]
BEFORE, AFTER = programs(MIGRATION)
NAMES = ("flat", "sketched", "value", "error", "semidefinite")
TRUTH = float(jnp.sum(jnp.arange(1.0, 201.0) ** -2) + 200 * 0.01)
OLD = os.environ.get("TRACEAX_1")


# The standard deviation with normal probes: var z* A z = 2 |A|_F^2.
DEVIATION = (2 * jnp.sum((jnp.diag(jnp.arange(1.0, 201.0) ** -2) + 0.01) ** 2) / 60) ** 0.5


def agrees(found: dict[str, float]) -> None:
    assert 0.0 < found["error"] < 0.01
    assert abs(found["flat"] - TRUTH) < 4 * DEVIATION
    for name in ("sketched", "value", "semidefinite"):
        assert abs(found[name] - TRUTH) < 0.02


@pytest.mark.slow
def test_the_new_program() -> None:
    scope: dict[str, Any] = {}
    with default_settings():
        exec(compile(AFTER, "CHANGELOG.md", "exec"), scope)
    agrees({name: float(scope[name]) for name in NAMES})


@pytest.mark.skipif(OLD is None, reason="TRACEAX_1 names no folder with traceax 1.0.2")
def test_the_old_program() -> None:
    program = f"{BEFORE}\nimport json, traceax\nassert traceax.__version__ == '1.0.2'\n"
    program += f"print(json.dumps([float(x) for x in ({', '.join(NAMES)})]))"
    *_, last = python("-c", program, folder=OLD, PYTHONPATH=str(OLD)).splitlines()
    agrees(dict(zip(NAMES, json.loads(last), strict=True)))


def test_every_old_name_has_a_new_one() -> None:
    """The public names of 1.0.2 are in the table; the names beside them exist."""
    old = ("Hutchinson", "HutchPlusPlus", "XTrace", "XNysTrace", "AbstractTrace")
    names = [f"{name}Estimator" for name in old]
    names += [f"{name}Sampler" for name in ("Rademacher", "Normal", "Sphere", "Abstract")]
    rows = [line.split("|")[1:3] for line in MIGRATION.splitlines() if line[:2] == "| "]
    for name in names:
        news = [new for before, new in rows if re.search(rf"\b{name}\b", before)]
        assert news, name
        for thing in re.findall(r"`(?:sampler=tx\.)?(\w+)", news[0]):
            assert hasattr(tx, thing), thing
        with pytest.raises(AttributeError, match=rf"{name}.*1\.0\.2") as caught:
            getattr(tx, name)
        (use,) = re.findall(r"Use traceax\.(\w+)", str(caught.value))
        assert hasattr(tx, use)
