"""Diagonals and norms. (Floor 4; uses `_traces` and all below.)

The front door `diagonal`, the estimators that it chooses from, row norms and the Frobenius
norm. A new estimator of the diagonal is a room here.
"""
