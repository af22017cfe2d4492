"""Stochastic trace estimation that you can differentiate."""

from traceax._estimate import Estimate as Estimate
from traceax._exchangeable import xnystrace as xnystrace
from traceax._exchangeable import xtrace as xtrace
from traceax._hutchinson import hutchinson_trace as hutchinson_trace
from traceax._hutchpp import hutchpp_trace as hutchpp_trace
from traceax._hutchpp import na_hutchpp_trace as na_hutchpp_trace
from traceax._samplers import normal as normal
from traceax._samplers import orthogonal as orthogonal
from traceax._samplers import rademacher as rademacher
from traceax._samplers import sphere as sphere
from traceax._trace import trace as trace
