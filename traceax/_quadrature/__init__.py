"""f(A) on a Krylov space, before it has a name for users. (Layer 2; uses `_linalg`.)

`scalar` is the function, `dense` what it makes of a small matrix, `nodes` the derivative,
`block_quadrature` the engine of `function_trace` and `logdet`, `block_arnoldi` that of
operators that are not Hermitian. A new way to read f(A) off a space is a module here, a new
function of a matrix with a name of its own one in `_functions`.
"""
