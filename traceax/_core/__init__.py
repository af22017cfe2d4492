"""What every estimator stands on. (The ground floor; uses nothing of ours.)

An operator as a map of blocks, the derivative rule, the estimate that is returned, the
checks of arguments. A new message to the user goes into `checks`, or `function_checks` if
it is about a function; a new question to lineax into `operator`.

The tour of the house. Arrows run downwards only; a test draws them and fails otherwise.

    floor 7   _testing     checks of what users write, generated operators
    floor 6   _tasks       what `python -m traceax` does with a matrix, by the front doors
    floor 5   _calculus    divergence, laplacian, Hessian diagonals: for losses
              _functions   traces and diagonals of f(A), likelihoods
    floor 4   _diagonals   diagonals and norms
    floor 3   _traces      traces
    floor 2   _quadrature  f(A) on a Krylov space, and its derivative
              _probes      random vectors: samplers, and how a budget becomes probes
    floor 1   _linalg      small dense linear algebra of tall blocks
              _core        operators, the rule, estimates, checks
              _command     matrix files, options and tables of `python -m traceax`

A call of `traceax.xtrace` passes through four of them: `_core.checks` judges what it got,
`_probes.draw` makes probes, `_core.rule` runs the algorithm that `_traces.xtrace` holds,
`(LinearMap, probes) -> Outcome`, made of the arithmetic of `_linalg`, and freezes what the
derivative reads. So a new estimator is one room: a public function that checks, draws and
calls the rule, and its algorithm beneath it. Then its name goes into `traceax/__init__.py`,
and its line into the tables of `tests/helpers.py`, which test it as all others are tested.
"""
