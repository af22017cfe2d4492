"""Linear algebra of tall blocks and of small matrices. (Layer 1; imports no others.)

`columns` has arithmetic by columns and rows, and sums over samples that come in batches.
`lapack` has decompositions that are safe under `vmap`, and `basis` has orthonormal bases of
tall blocks and their downdates. `krylov` makes Krylov spaces and the complements of those
without one start. `nystrom` makes Nyström approximations, and leaves probes out of them.
`conjugate_gradients` has preconditioners, Galerkin's solution and the solver.
`jackknife` has standard errors of all kinds. No module here knows operators, probes or
estimates: a linear map is a function of blocks.
"""
