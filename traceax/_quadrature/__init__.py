"""f(A) on a Krylov space. (Layer 2; uses `_core` and `_linalg`.)

`scalar` has the functions that users give: `fn` of a scalar, and `combine` of several
traces, with its error bar. `dense` has functions of small Hermitian matrices, and f(A) as
a linear map. `nodes` has quadratures, which are nodes, weights and the pairs of vectors of
the derivative, and the split rule, which makes these pairs for Hermitian operators.

Two modules estimate tr f(A) from a block Krylov run. `block_quadrature` serves Hermitian
operators: `function_trace`, `logdet`, `inv_quad_logdet`, and the spectrum that
`function_diagonal` reads. `block_arnoldi` serves operators that are not Hermitian.
"""
