"""What lives where, and where a new thing goes.

Imports go downwards only.

    layer 4   _calculus    divergence, laplacian, Hessian diagonals: for losses
              _functions   traces and diagonals of f(A), likelihoods
    layer 3   _estimators  traces, sums over leaves, diagonals, norms
    layer 2   _quadrature  f(A) on a Krylov space, and its derivative
              _probes      samplers, and how a budget becomes probes
    layer 1   _linalg      small dense linear algebra of tall blocks
              _core        operators, the rule, estimates, checks

`traceax.xtrace` calls `_estimators.driver.estimate` with a `Method`. The driver checks the
arguments (`checks`), answers exactly if the budget allows it, draws probes, and runs the
method under the rule (`rule`), which compiles it and freezes what the derivative reads.

A new thing has one place, and one of its kind stands there to look at:

    an estimator; a target of estimators   _estimators: `xtrace`; `_estimators.readouts`
    an estimator of f(A), a likelihood     _functions: `slq`
    a differential operator                _calculus: `laplacian`
    a sampler; its properties              `_probes.samplers`; `_probes.draw`
    a Krylov method for f(A)               _quadrature: `block_arnoldi`
    a factorisation, an error bar          _linalg: `nystrom`, `jackknife`
    how estimates print and combine        `_core.estimate`
    layouts; constants of programs         `_core.layout`; `_core.canonical`
    a call of lineax; an error message     `_core.operator`; `_core.checks`
    a kind of matrix that people have      `_core.conversion`, `_core.sparse`
    a check of users' code; a matrix file  `testing.py`; `__main__.py`
    a comparison with other libraries      `tests/benchmarks`: `table`, `report`
    a page, a notebook                     `notebooks/site/docs`, `notebooks`; mkdocs.yml

Whatever is public is also in `traceax/__init__.py`, `tests/calls.py`, a page of the
reference and the changelog; tests fail where one is missing.
"""
