"""Traces, sums over leaves, diagonals and norms. (Layer 3; uses layers 1 and 2.)

`driver` takes a request to an estimate, `readouts` says what is estimated and how the
derivative reads it, `automatic` chooses.
A new estimator is a module here: a public function that calls `driver.estimate`, and the
`Method` beneath it. `adaptive`, `custom` and `deltashift` spend in ways of their own.
"""
