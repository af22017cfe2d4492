"""The tour of the house, whose ground floor this is: what every estimator stands on.

Wings are folders, rooms are files of one noun, arrows run downwards only; a test draws them
and fails otherwise.

    floor 5   _calculus    divergence, laplacian, Hessian diagonals: for losses
              _functions   traces and diagonals of f(A), likelihoods
    floor 4   _diagonals   diagonals and norms
    floor 3   _traces      traces
    floor 2   _quadrature  f(A) on a Krylov space, and its derivative
              _probes      random vectors: samplers, and how a budget becomes probes
    floor 1   _linalg      small dense linear algebra of tall blocks
              _core        operators, the rule, estimates, checks

A call of `traceax.xtrace` passes through four of them: `_core.checks` judges what it got,
`_probes.draw` makes probes, `_core.rule` runs the algorithm that `_traces.xtrace` holds,
`(LinearMap, probes) -> Outcome`, made of the arithmetic of `_linalg`, and freezes what the
derivative reads. So a new estimator is one room: a public function that checks, draws and
calls the rule, and its algorithm beneath it.

A new thing has one place, and one of its kind stands there to look at:

    an estimator of the trace         a room of _traces: `xtrace`
    of the diagonal, of a norm        a room of _diagonals: `xdiag`, `frobenius`
    of f(A), a likelihood             a room of _functions: `slq`, by _quadrature's engines
    a differential operator           a room of _calculus: `divergence`
    a sampler                         a room of _probes: `hadamard`, and what `traits` knows
    a Krylov engine for f(A)          a room of _quadrature: `block_arnoldi`
    a factorisation, an error bar     a room of _linalg: `nystrom`, `jackknife`
    how estimates print, combine      `_core.words`, `_core.pool`
    a question to lineax              `_core.operator`
    a message to the user             the `checks` of its subject: an operator, a key, a
                                      budget, a shift, in `_core.checks`; a user's function
                                      or algorithm in `function_checks`
    a check of what users write       `testing.py`
    a kind of matrix file             `__main__.py`
    a comparison with other libraries a file of tests/benchmarks, and its line in `report`
    a page, a notebook                `notebooks/site/docs`, `notebooks`; both in mkdocs.yml

Whatever is public has its line in `traceax/__init__.py`, in `tests/calls.py`, on a page of
the reference (`notebooks/site`), and in the changelog. An estimator that takes an operator,
a key and a budget stands in a table of `tests/helpers.py`, too, a sampler in that of
`tests/test_statistics.py`, which test it as all others are tested; where these know a fact
of each by its name, what its gradient costs, say, a test fails that asks for it.
"""
