"""Checks annotations at run time (ints may be floats, as for type checkers), with pytest's
options `-p tests.typechecker --jaxtyping-packages=traceax,tests.typechecker.checked`."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
