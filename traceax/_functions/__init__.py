"""Functions of a matrix, and likelihoods. (Layer 4; uses all below.)

`function_trace` has `function_trace`, `logdet`, `schatten_norm` and `arnoldi_trace`;
`function_diagonal` has diagonals, `slq` the quadrature of each probe and densities, and
`inv_quad_logdet` log-determinants together with a solution. `exact_functions` answers for
operators that are small, and `equations` has shifts, right-hand sides and preconditioners.
The quadratures themselves are in `_quadrature`.
"""
