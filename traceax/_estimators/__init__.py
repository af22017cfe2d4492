"""Estimators of traces, sums over leaves, diagonals and norms.

This is layer 3, which uses layers 1 and 2.

`call` is the door that every public function goes through, and `readouts` holds the linear
maps that the derivative rule reads. `hutchinson`, `hutchpp`, `xtrace`, `xdiag`,
`krylov_nystrom` and `norms` each contain one algorithm or one family. `second_batch` and
`deflated_colours` use the first matvecs to choose between two algorithms, `near_diagonal`
has the forms of operators that are nearly diagonal, and `automatic` chooses by structure,
tags and budget. `adaptive` grows a sketch until it meets a tolerance, `tolerance` makes
runs of any estimator until they meet one, `deltashift` follows an operator that changes,
`control_variate` uses a cheaper operator, `selected_entries` estimates entries on a
pattern, and `custom` runs a user's algorithm.
"""
