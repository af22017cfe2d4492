"""f(A) on a Krylov space. (Layer 2; uses `_core` and `_linalg`.)

`scalar` has the functions that users give, `dense` functions of small matrices, `nodes`
quadratures and their derivatives. `block_quadrature` is the engine of `function_trace` and
`logdet`, `block_arnoldi` that of operators that are not Hermitian.
"""
