"""Derivatives of functions at a point, for losses. (Layer 4; uses all below.)

`laplacian` has the divergence, the Laplacian, the biharmonic operator and the diagonal of
the Hessian. `gauss_newton` has Gauss-Newton and Fisher matrices as operators. `taylor`
propagates second derivatives forwards, and `sampled` takes means over probes.
"""
