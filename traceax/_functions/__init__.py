"""Traces, diagonals of functions of a matrix. (Layer 4; uses all below.)

The automatic choices `function_trace` and `logdet`, quadrature by Lanczos and Arnoldi,
norms and densities made of it; what they have in common is in `_quadrature`.
Log-determinants with a solution beside them, and preconditioners.
"""
