"""Checks annotations at run time, ints for floats as type checkers do:
`python -m pytest --jaxtyping-packages=traceax,tests.typechecker.checked`."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
