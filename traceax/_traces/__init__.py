"""Traces. (Floor 3; uses `_core`, `_linalg` and `_probes`.)

The front door `trace`, the estimators that it chooses from, a room for each, and two that
decide for themselves how much to spend: `adaptive` and `deltashift`. What leave-one-out
estimators share stands in `leave_one_out`, what the derivative reads through in `weights`.
A new estimator of the trace is a room here.
"""
