"""Stochastic trace estimation that you can differentiate."""

import typing as _typing

from traceax._calculus.gauss_newton import empirical_fisher as empirical_fisher
from traceax._calculus.gauss_newton import gauss_newton as gauss_newton
from traceax._calculus.laplacian import biharmonic as biharmonic
from traceax._calculus.laplacian import divergence as divergence
from traceax._calculus.laplacian import hessian_diagonal as hessian_diagonal
from traceax._calculus.laplacian import laplacian as laplacian
from traceax._core.conversion import as_operator as as_operator
from traceax._core.estimate import Estimate as Estimate
from traceax._core.layout import Layout as Layout
from traceax._core.pooling import pool as pool
from traceax._core.pooling import unbiased_square as unbiased_square
from traceax._estimators.adaptive import adaptive_trace as adaptive_trace
from traceax._estimators.automatic import diagonal as diagonal
from traceax._estimators.automatic import leaf_traces as leaf_traces
from traceax._estimators.automatic import trace as trace
from traceax._estimators.control_variate import (
    control_variate_trace as control_variate_trace,
)
from traceax._estimators.custom import custom_trace as custom_trace
from traceax._estimators.deltashift import deltashift as deltashift
from traceax._estimators.hutchinson import hutchinson_diagonal as hutchinson_diagonal
from traceax._estimators.hutchinson import hutchinson_trace as hutchinson_trace
from traceax._estimators.hutchpp import diagpp as diagpp
from traceax._estimators.hutchpp import hutchpp_trace as hutchpp_trace
from traceax._estimators.hutchpp import na_hutchpp_trace as na_hutchpp_trace
from traceax._estimators.krylov_nystrom import xnystrace as xnystrace
from traceax._estimators.norms import frobenius_norm_squared as frobenius_norm_squared
from traceax._estimators.norms import row_norms_squared as row_norms_squared
from traceax._estimators.selected_entries import selected_entries as selected_entries
from traceax._estimators.tolerance import adaptive as adaptive
from traceax._estimators.xdiag import xdiag as xdiag
from traceax._estimators.xdiag import xnysdiag as xnysdiag
from traceax._estimators.xtrace import xtrace as xtrace
from traceax._functions.equations import preconditioner as preconditioner
from traceax._functions.function_diagonal import function_diagonal as function_diagonal
from traceax._functions.function_trace import arnoldi_trace as arnoldi_trace
from traceax._functions.function_trace import function_trace as function_trace
from traceax._functions.function_trace import logdet as logdet
from traceax._functions.function_trace import schatten_norm as schatten_norm
from traceax._functions.inv_quad_logdet import InvQuadLogdet as InvQuadLogdet
from traceax._functions.inv_quad_logdet import inv_quad_logdet as inv_quad_logdet
from traceax._functions.krylov import Krylov as Krylov
from traceax._functions.krylov import krylov as krylov
from traceax._functions.neighbours import Neighbours as Neighbours
from traceax._functions.neighbours import graph_neighbours as graph_neighbours
from traceax._functions.neighbours import nearest_neighbours as nearest_neighbours
from traceax._functions.slq import slq_trace as slq_trace
from traceax._functions.spectral_density import spectral_density as spectral_density
from traceax._functions.whitening import Whitening as Whitening
from traceax._functions.whitening import vecchia as vecchia
from traceax._probes.colouring import colouring as colouring
from traceax._probes.probing import probing as probing
from traceax._probes.samplers import Sampler as Sampler
from traceax._probes.samplers import hadamard as hadamard
from traceax._probes.samplers import normal as normal
from traceax._probes.samplers import orthogonal as orthogonal
from traceax._probes.samplers import rademacher as rademacher
from traceax._probes.samplers import sphere as sphere

__version__ = "2.1.0"

# In `help`, tracebacks and pickles they go by the names that users write.
for _thing in list(globals().values()):
    if getattr(_thing, "__module__", "").startswith("traceax."):
        _thing.__module__ = "traceax"

# Names of version 1.0.2, and what to use instead.
_FORMER = {
    "HutchinsonEstimator": "hutchinson_trace(operator, key, num_matvecs)",
    "HutchPlusPlusEstimator": "hutchpp_trace(operator, key, num_matvecs)",
    "XTraceEstimator": "xtrace(operator, key, num_matvecs)",
    "XNysTraceEstimator": "xnystrace(operator, key, num_matvecs)",
    "AbstractTraceEstimator": "custom_trace(algorithm, operator, key, num_probes)",
    "RademacherSampler": "rademacher, a function: sampler=tx.rademacher",
    "NormalSampler": "normal, a function: sampler=tx.normal",
    "SphereSampler": "sphere, a function: sampler=tx.sphere",
    "AbstractSampler": "rademacher or any function (key, structure, num_probes) -> probes",
}

# Names that other libraries have.
_FOREIGN = {
    "diag": ["diagonal"],
    "lanczos": ["function_trace", "slq_trace"],
    "nuclear_norm": ["schatten_norm"],
    "slogdet": ["logdet"],
    "slq": ["slq_trace"],
}

if not _typing.TYPE_CHECKING:  # a type checker would take every name for one that exists

    def __getattr__(name: str) -> _typing.NoReturn:
        message = f"module 'traceax' has no attribute {name!r}"
        if name in _FORMER:
            message += f", which was in version 1.0.2. Use traceax.{_FORMER[name]}"
        elif not name.startswith("_"):
            import difflib  # noqa: PLC0415

            public = [known for known in globals() if not known.startswith("_")]
            near = _FOREIGN.get(name) or difflib.get_close_matches(name, public)
            if near:
                message += f". Did you mean {' or '.join(f'traceax.{x}' for x in near)}?"
        raise AttributeError(message)
