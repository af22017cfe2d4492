"""A map of the package: what lives where, how a call runs, and where a new thing goes.

Imports go downwards only.

    layer 4   _calculus    divergence, laplacian, Hessian diagonals: for losses
              _functions   traces and diagonals of f(A), likelihoods
    layer 3   _estimators  traces, sums over leaves, diagonals, norms
    layer 2   _quadrature  f(A) on a Krylov space, and its derivative
              _probes      samplers, and how a budget becomes probes
    layer 1   _linalg      small dense linear algebra of tall blocks
              _core        operators, the rule, estimates, checks

How a call runs: a public function begins a `Call` (`_estimators.call`). This is the door
that all of them go through: `begin` checks the arguments and makes the operator canonical,
once. The call then draws probes, or answers exactly, and `finish` runs the algorithm under
the derivative rule (`_core.rule`), which compiles it and freezes what the derivative reads.
An algorithm is a plain function `(subject, probes) -> Outcome`, or several stages, which
are programs of their own outside of `jax.jit`: those that apply the operator, and those
that depend on its space alone.

This package, `_core`, has these modules: `operator` (what estimators ask of operators),
`questions` (answers that lineax wants from every class), `vectors` (pytrees as columns of
blocks), `layout` (how a block goes through an operator), `canonical` (equal functions share
one program), `rule`, `checks` (error messages), `estimate`, `printing` and `pooling` (what
estimators return, how it prints, how several become one), `conversion` and `sparse` (from
what people have to an operator), `keys` (of samples and blocks).

A new thing has one place. Copy one of its kind:

    an estimator of one operator           `_estimators.xtrace`
    one that takes more than an operator   `_estimators.control_variate`
    a way to sum the rows of a diagonal    `_estimators.readouts`
    an estimator of f(A); a likelihood     `function_diagonal`; `inv_quad_logdet`
    what a finished run can answer         `_functions.krylov`
    a structure that splits log det        `_functions.structures`
    a factor of entries; its neighbours    `_functions.whitening`, `neighbours`
    a derivative along probes              `_calculus.sampled`
    a differential operator                `_calculus.laplacian`
    a sampler and its properties           `_probes.samplers`
    a Krylov method for f(A)               `_quadrature.block_arnoldi`
    a factorisation, an error bar          `_linalg.nystrom`, `_linalg.jackknife`
    how estimates print and combine        `_core.printing`, `_core.pooling`
    layouts; constants of programs         `_core.layout`; `_core.canonical`
    a question to operators; an error      `_core.operator`; `_core.checks`
    a kind of matrix that people have      `_core.conversion`, `_core.sparse`
    a check of users' code; a matrix file  `testing.py`; `__main__.py`
    a comparison with other libraries      `tests/benchmarks`: `table`, `report`
    a page, a notebook                     `notebooks/site/docs`, `notebooks`; mkdocs.yml

Whatever is public is also in `traceax/__init__.py`, `tests/calls.py`, a page of the
reference and the changelog; tests fail where one is missing.

Which tests does a change run? Those that `tests/map.py` names for its modules, quick and
slow ones: `python -m pytest -m "not nightly" $(python -m tests.map NAME)`. The linter
and the type checker need extras: `pip install -e ".[test,lint,notebooks,benchmarks]"`, then
`pre-commit run --all-files`.
"""
