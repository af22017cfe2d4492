"""Traces, diagonals of functions of a matrix. (Floor 5; uses `_diagonals` and all below.)

The front doors `function_trace` and `logdet`, quadrature by Lanczos and Arnoldi, norms and
densities made of it. `scalar` is the function, `dense` what it makes of a small matrix,
`split` the derivative. A new function of a matrix with a name of its own is a room here.
"""
