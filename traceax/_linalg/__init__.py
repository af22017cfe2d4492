"""Linear algebra of tall blocks and of small matrices. (Layer 1; imports no others.)

`columns` has the arithmetic of blocks, `basis` orthonormal bases and their downdates,
`nystrom` Nyström approximations and preconditioners, `krylov` Krylov spaces,
`conjugate_gradients` the solver, `lapack` decompositions, `jackknife` standard errors. No
module here knows operators, probes or estimates: a linear map is a function of blocks.
"""
