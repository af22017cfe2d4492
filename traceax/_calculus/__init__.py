"""Derivatives of functions, for losses. (Layer 4; uses all below.)

Divergence, Laplacian, biharmonic operator and Hessian diagonal of a function at a point,
Gauss-Newton and Fisher matrices, and squares of estimates without bias. `taylor` propagates
second derivatives forwards; `sampled` is the mean over probes that they share.
"""
