"""Stochastic trace estimation that you can differentiate."""

from traceax._diagonal import diagonal as diagonal
from traceax._diagpp import diagpp as diagpp
from traceax._estimate import Estimate as Estimate
from traceax._exchangeable import xnystrace as xnystrace
from traceax._exchangeable import xtrace as xtrace
from traceax._hutchinson import hutchinson_diagonal as hutchinson_diagonal
from traceax._hutchinson import hutchinson_trace as hutchinson_trace
from traceax._hutchpp import hutchpp_trace as hutchpp_trace
from traceax._hutchpp import na_hutchpp_trace as na_hutchpp_trace
from traceax._norms import frobenius_norm_squared as frobenius_norm_squared
from traceax._norms import row_norms_squared as row_norms_squared
from traceax._probing import colouring as colouring
from traceax._probing import probing as probing
from traceax._samplers import normal as normal
from traceax._samplers import orthogonal as orthogonal
from traceax._samplers import rademacher as rademacher
from traceax._samplers import sphere as sphere
from traceax._trace import trace as trace
from traceax._xdiag import xdiag as xdiag
from traceax._xdiag import xnysdiag as xnysdiag
from traceax._slq import slq_trace as slq_trace
from traceax._function_trace import function_trace as function_trace
from traceax._logdet import logdet as logdet
