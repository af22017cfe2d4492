"""Functions of a matrix, and likelihoods. (Layer 4; uses all below.)

`arguments` has what all of them share: f, and what a budget becomes. `function_trace` has
`function_trace`, `logdet`, `schatten_norm` and `arnoldi_trace`. `function_diagonal` has
diagonals. `slq` has the quadrature of each probe, and spectral
densities. `inv_quad_logdet` has log-determinants together with the solution of an equation.
`exact_functions` has the exact answers for small operators, and `equations` has shifts,
right-hand sides and preconditioners. `whitening` makes sparse factors from entries, for
`neighbours` that it finds on the host. The quadratures themselves are in `_quadrature`.
"""
