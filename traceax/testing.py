"""Tests for what you write yourself: operators, samplers, estimators.

Needs `pip install "traceax[test]"`, for hypothesis. Nothing of it is imported by
`import traceax`.
"""

try:
    import hypothesis as _hypothesis  # noqa: F401
except ImportError as error:
    raise ImportError(
        "traceax.testing must have hypothesis, because `operators` is a strategy of it, "
        'but it is not installed. Run pip install "traceax[test]".'
    ) from error

from traceax._testing.estimator_check import check_estimator
from traceax._testing.operator_check import check_operator
from traceax._testing.operators import operators
from traceax._testing.sampler_check import check_sampler

__all__ = ["check_estimator", "check_operator", "check_sampler", "operators"]

for _thing in (check_estimator, check_operator, check_sampler, operators):
    _thing.__module__ = "traceax.testing"
