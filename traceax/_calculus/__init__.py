"""Derivatives of functions, for losses. (Floor 5; uses `_diagonals` and all below.)

Divergence, Laplacian and Hessian diagonal of a function at a point, and squares of
estimates without bias. `taylor` propagates second derivatives forwards. A new differential
operator is a room here.
"""
