"""What lives where, and where a new thing goes.

Packages stand on layers, modules hold a subject each, and imports run downwards only, which
`lint-imports` checks.

    layer 4   _calculus    divergence, laplacian, Hessian diagonals: for losses
              _functions   traces and diagonals of f(A), likelihoods
    layer 3   _estimators  traces, sums over leaves, diagonals, norms
    layer 2   _quadrature  f(A) on a Krylov space, and its derivative
              _probes      random vectors: samplers, and how a budget becomes probes
    layer 1   _linalg      small dense linear algebra of tall blocks
              _core        operators, the rule, estimates, checks

A call of `traceax.xtrace` is a call of `_estimators.driver.estimate` with the `Method`
beneath it. The driver checks what it got (`_core.checks`), answers exactly where the budget
allows it (`_estimators.readouts`), draws probes (`_probes`), and runs the method under the
rule (`_core.rule`), which compiles it and freezes what the derivative reads. A method is
made of the arithmetic of `_linalg`. So a new estimator is one module.

A new thing has one place, and one of its kind stands there to look at:

    an estimator of a trace, a        a module of _estimators: `xtrace`, `xdiag`, `norms`
    diagonal or a norm
    another target of estimates       `_estimators.readouts`
    of f(A), a likelihood             a module of _functions: `slq`; _quadrature has engines
    a differential operator           a module of _calculus: `divergence`
    a sampler                         a module of _probes: `hadamard`; what `draw` knows
    a Krylov engine for f(A)          a module of _quadrature: `block_arnoldi`
    a factorisation, an error bar     a module of _linalg: `nystrom`, `jackknife`
    how estimates print, combine      `_core.estimate`, `_core.pool`
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
