"""Which tests belong to a module of the package.

`python -m pytest $(python -m tests.map NAME)` runs them. Beside these,
`tests/test_settings.py` runs every public function, and `tests/test_documents.py` every
example. `tests/benchmarks/mutants.py` makes faults in a module, and says which of its tests
find them.
"""

import sys

TESTS: dict[str, list[str]] = {
    "__main__": ["test_main"],
    "testing": ["testing"],
    "_calculus/gauss_newton": ["calculus/test_gauss_newton"],
    "_calculus/laplacian": ["calculus/test_sketched", "calculus/test_calculus"],
    "_calculus/sampled": ["calculus/test_biharmonic", "calculus/test_calculus"],
    "_calculus/taylor": ["calculus/test_biharmonic", "calculus/test_calculus"],
    "_core/canonical": ["core/test_canonical"],
    "_core/checks": ["core/test_messages", "test_contract"],
    "_core/conversion": ["core/test_as_operator"],
    "_core/estimate": ["core/test_messages", "core/test_pool", "core/test_printing"],
    "_core/keys": ["probes/test_sampler_record", "estimators/test_leave_one_out"],
    "_core/layout": ["core/test_layout", "test_batches"],
    "_core/operator": [
        "core/test_own_class",
        "core/test_layout",
        "test_exactness",
        "test_noise",
    ],
    "_core/pooling": ["core/test_pool", "calculus/test_calculus"],
    "_core/printing": ["core/test_printing"],
    "_core/questions": ["core/test_own_class"],
    "_core/rule": ["test_autodiff", "core/test_failures"],
    "_core/sparse": ["core/test_as_operator", "probes/test_pattern_cache"],
    "_core/vectors": ["core/test_layout"],
    "_estimators/adaptive": ["estimators/test_adaptive"],
    "_estimators/automatic": [
        "test_contract",
        "core/test_printing",
        "estimators/test_near_diagonal",
    ],
    "_estimators/call": [
        "estimators/test_call",
        "test_contract",
        "estimators/test_leave_one_out",
    ],
    "_estimators/control_variate": ["estimators/test_control_variate"],
    "_estimators/custom": ["estimators/test_custom"],
    "_estimators/deflated_colours": ["probes/test_probing"],
    "_estimators/deltashift": ["estimators/test_deltashift"],
    "_estimators/hutchinson": [
        "estimators/test_call",
        "test_exactness",
        "test_statistics",
        "test_contract",
    ],
    "_estimators/hutchpp": [
        "test_exactness",
        "estimators/test_leave_one_out",
        "test_statistics",
    ],
    "_estimators/krylov_nystrom": [
        "estimators/test_rounding",
        "estimators/test_leave_one_out",
        "test_autodiff",
        "test_contract",
        "estimators/test_near_diagonal",
        "estimators/test_second_batch",
    ],
    "_estimators/near_diagonal": ["estimators/test_near_diagonal", "test_contract"],
    "_estimators/norms": ["estimators/test_norms", "test_exactness", "test_statistics"],
    "_estimators/readouts": [
        "estimators/test_leaf_traces",
        "test_autodiff",
        "test_exactness",
    ],
    "_estimators/second_batch": [
        "estimators/test_call",
        "estimators/test_second_batch",
        "test_contract",
    ],
    "_estimators/selected_entries": ["estimators/test_selected_entries"],
    "_estimators/tolerance": ["estimators/test_tolerance"],
    "_estimators/xdiag": [
        "estimators/test_rounding",
        "estimators/test_leave_one_out",
        "test_exactness",
        "test_statistics",
    ],
    "_estimators/xtrace": [
        "estimators/test_rounding",
        "estimators/test_leave_one_out",
        "test_exactness",
        "test_statistics",
    ],
    "_functions/arguments": ["functions/test_whitening", "functions/test_functions"],
    "_functions/equations": ["functions/test_likelihood", "functions/test_whitening"],
    "_functions/exact_functions": [
        "functions/test_singular",
        "functions/test_functions",
        "functions/test_block_diagonal",
        "functions/test_schatten",
    ],
    "_functions/function_diagonal": [
        "functions/test_block_diagonal",
        "functions/test_functions",
    ],
    "_functions/function_trace": [
        "functions/test_schatten",
        "functions/test_functions",
        "functions/test_logdet",
        "quadrature/test_combination",
    ],
    "_functions/inv_quad_logdet": ["functions/test_likelihood", "functions/test_whitening"],
    "_functions/krylov": ["functions/test_krylov"],
    "_functions/neighbours": ["functions/test_whitening"],
    "_functions/slq": [
        "functions/test_functions",
        "functions/test_schatten",
        "quadrature/test_radau",
    ],
    "_functions/spectral_density": [
        "functions/test_functions",
        "test_batches",
        "functions/test_krylov",
    ],
    "_functions/structures": ["functions/test_structures"],
    "_functions/whitening": ["functions/test_whitening"],
    "_linalg/basis": ["linalg/test_bases", "test_exactness"],
    "_linalg/columns": [
        "linalg/test_columns",
        "test_batches",
        "linalg/test_bases",
        "test_exactness",
    ],
    "_linalg/conjugate_gradients": [
        "functions/test_likelihood",
        "functions/test_whitening",
    ],
    "_linalg/jackknife": [
        "linalg/test_jackknife",
        "estimators/test_leave_one_out",
        "test_statistics",
        "quadrature/test_block_quadrature",
    ],
    "_linalg/krylov": [
        "linalg/test_krylov",
        "linalg/test_left_out",
        "quadrature/test_block_quadrature",
        "functions/test_arnoldi",
    ],
    "_linalg/lapack": ["linalg/test_lapack", "test_exactness"],
    "_linalg/nystrom": [
        "test_exactness",
        "test_statistics",
        "estimators/test_leave_one_out",
    ],
    "_probes/colouring": ["probes/test_colouring", "probes/test_probing"],
    "_probes/draw": [
        "probes/test_sampler_record",
        "probes/test_probing_errors",
        "test_contract",
    ],
    "_probes/probing": [
        "probes/test_probing",
        "probes/test_probing_errors",
        "probes/test_pattern_cache",
    ],
    "_probes/samplers": ["probes/test_sampler_record", "testing"],
    "_probes/stream": ["test_batches", "probes/test_sampler_record"],
    "_quadrature/block_arnoldi": [
        "functions/test_arnoldi",
        "functions/test_coloured_arnoldi",
    ],
    "_quadrature/block_quadrature": [
        "quadrature",
        "functions/test_block_diagonal",
        "functions/test_functions",
    ],
    "_quadrature/dense": [
        "quadrature",
        "functions/test_functions",
        "functions/test_singular",
    ],
    "_quadrature/nodes": [
        "quadrature",
        "functions/test_arnoldi",
        "functions/test_functions",
    ],
    "_quadrature/scalar": [
        "quadrature",
        "functions/test_functions",
        "functions/test_singular",
    ],
}


def files_of(module: str) -> list[str]:
    """The files and folders, from the root of the repository."""
    names = (f"tests/{name}" for name in TESTS[module])
    return [f"{name}.py" if "/test_" in name else name for name in names]


if __name__ == "__main__":
    print(*(name for module in TESTS if sys.argv[1] in module for name in files_of(module)))
