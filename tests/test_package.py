"""What `import traceax` imports, names of public things, checked annotations."""

import ast
import inspect
import re
from pathlib import Path

import jax.numpy as jnp
import jaxtyping
import pytest

import traceax
from tests.helpers import python
from tests.map import TESTS, files_of
from traceax._linalg.columns import column_dots

PACKAGE = Path(traceax.__file__).parent
PACKAGES = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def test_public_things_have_the_name_that_users_import() -> None:
    for name, thing in vars(traceax).items():
        if not name.startswith("_") and not inspect.ismodule(thing):
            assert (thing.__module__, thing.__qualname__) == ("traceax", name)


def test_the_import_leaves_out_what_few_calls_need() -> None:
    """The checks of `traceax.testing` do not need hypothesis either."""
    before = "import sys, jax, equinox, lineax; before = set(sys.modules)"
    after = "import traceax; new = set(sys.modules) - before"
    checks = "sys.modules['hypothesis'] = None; import traceax.testing as t"
    program = f"{before}; {after}; {checks}; print(*new, t.check_operator.__name__)"
    *new, check = python("-c", program).split()
    assert check == "check_operator"
    assert "traceax" in new
    heavy = ("hypothesis", "scipy.sparse", "jax.experimental.sparse", "matplotlib")
    heavy += ("argparse", "traceax.testing")
    assert not [name for name in new if name.startswith(heavy)]


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def test_the_map_of_the_package_names_only_what_exists() -> None:
    """The table in the docstring of `traceax._core`: where a new thing goes."""
    text = docstring(PACKAGE / "_core/__init__.py")
    named = re.findall(r"`([^`]+)`", text.split("of its kind:")[1].split("Whatever")[0])
    paths = [*PACKAGE.rglob("*.py"), *Path(__file__).parent.rglob("*.py")]
    known = {name for path in paths for name in (path.stem, path.name)}
    known |= {f"{path.parent.name}.{path.stem}" for path in paths}
    assert len(named) > 20
    unknown = [name for name in named if name not in known]
    assert [name for name in unknown if not (PACKAGE.parent / name).is_dir()] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_what_each_of_its_modules_has(package: str) -> None:
    """Its docstring names every module that it has, and nothing that does not exist."""
    text = docstring(PACKAGE / package / "__init__.py")
    text = text.split("A new thing has one place")[0]
    named = set(re.findall(r"`([a-z_]+)`", text))
    modules = {path.stem for path in (PACKAGE / package).glob("*.py")} - {"__init__"}
    assert modules <= named
    public = {name for name in vars(traceax) if not name.startswith("_")}
    words = {"begin", "finish", "fn", "combine", "vmap"}
    assert named <= modules | public | set(PACKAGES) | words


def test_annotations_are_checked() -> None:
    with pytest.raises(jaxtyping.TypeCheckError, match="column_dots"):
        column_dots(jnp.ones((3, 2)), jnp.ones((3, 1)))


def test_every_module_has_tests() -> None:
    """The map names them, in files that exist."""
    modules = {str(p.relative_to(PACKAGE).with_suffix("")) for p in PACKAGE.rglob("*.py")}
    assert {name for name in modules if not name.endswith("__init__")} == TESTS.keys()
    for module in TESTS:
        assert all((PACKAGE.parent / name).exists() for name in files_of(module)), module
