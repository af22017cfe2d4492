"""Functions of a matrix, and likelihoods. (Layer 4; uses all below.)

`arguments` has what all of them share: f, and its bounds. `function_trace` has
`function_trace`, `logdet`, `schatten_norm` and `arnoldi_trace`. `function_diagonal` has
diagonals, and `spectral_density` has densities. `slq` has the quadrature of each probe.
`krylov` has runs that are kept, and what a budget becomes. `inv_quad_logdet` has
log-determinants together with the solution of an equation, and `structures` splits
log-determinants of scaled operators, blocks and Kronecker factors.
`exact_functions` has the exact answers for small operators, and `equations` has shifts,
right-hand sides and preconditioners. `whitening` makes sparse factors from entries, for
`neighbours` that it finds on the host. The quadratures themselves are in `_quadrature`.
"""
