"""Traces, sums over leaves, diagonals and norms. (Layer 3; uses layers 1 and 2.)

`call` is the door that every public function goes through, and `readouts` has what the
derivative reads. `hutchinson`, `hutchpp`, `xtrace`, `xdiag`, `krylov_nystrom` and `norms`
have an algorithm each. `second_batch` and `deflated_colours` choose between two by the
first matvecs, and `automatic` chooses by structure, tags and budget. `adaptive` grows a
sketch to a tolerance, `deltashift` follows a changing operator, `control_variate` uses a
cheaper one, `selected_entries` estimates entries on a pattern, and `custom` runs a user's
algorithm.
"""
