"""Traces, sums over leaves, diagonals and norms. (Layer 3; uses layers 1 and 2.)

`driver` takes a request to an estimate, `readouts` says what is estimated and how the
derivative reads it, `automatic` chooses.
"""
