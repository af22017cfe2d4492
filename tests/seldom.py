"""Which tests the README's command leaves to `python -m pytest -m slow`, beside those that
are marked where they stand: each takes a second or more, or has many twins, and a quicker
test of the same rule stays. CI runs them all.

By file, test and a pattern of its parameters, which is empty where all are meant.
"""

import re

SELDOM = {
    "calculus/test_calculus.py": {
        "test_a_flow": "",
        "test_a_hessian_diagonal_is_sketched_where_that_is_better": "",
        "test_every_operation_has_its_second_derivative": r"solver|branch|complex parts"
        r"|determinant|modulus|loop|checkpoint|transform|bits|order",
    },
    "command/test_main.py": {"test_tour_as_a_program": ""},
    "core/test_failures.py": {
        "test_transposition": r"(Function|Tangent|Add|Mul|Neg|Div|Composed|Tridiagonal"
        r"|Diagonal|Identity)-complex|xdiag-.*-float",
        "test_hashing": r"PyTree|Jacobian|row_norms|xtrace-nested",
    },
    "diagonals/test_norms.py": {"test_rectangular": r"complex"},
    "diagonals/test_second_batch.py": {
        "test_it_is_exact_where_either_is": r"complex128-(semi|symm)|float32-gen",
        "test_the_gradient_reads_what_the_value_read": r"poly",
        "test_the_mean_over_all_probes_and_lots": r"complex",
    },
    "functions/test_arnoldi.py": {
        "test_exact_from_n_applications": r"complex|normal|triangular|convection|multiple",
        "test_intervals_and_mean_slopes": "",
        "test_readings_against_explicit_projectors": r"float",
    },
    "functions/test_block_diagonal.py": {"test_derivatives_are_unbiased": ""},
    "functions/test_functions.py": {
        "test_diagonals_of_functions_with_colours": "",
        "test_inside_transformations": r"slq",
        "test_second_derivative_of_a_scaled_logarithm": "",
        "test_several_traces_from_one_run": r"arnoldi",
    },
    "functions/test_logdet.py": {
        "test_a_second_derivative_that_no_probe_matters_to": "",
        "test_recurrences_that_stop_short_are_visible_in_second_derivatives": "",
    },
    "functions/test_schatten.py": {"test_rectangular": r"shape0"},
    "linalg/test_krylov.py": {"test_derivatives_of_functions_of_matrices": r"values0"},
    "linalg/test_two_left_out.py": {"test_replicates": r"float-True"},
    "probes/test_colouring.py": {"test_triangles_of_roads": ""},
    "probes/test_meters.py": {
        "test_batches_are_shown_once_and_change_nothing": r"slq|biharmonic|hutchinson_diag"
    },
    "probes/test_witnesses.py": {"test_intervals_hold": ""},
    "quadrature/test_block_quadrature.py": {"test_exhausted_spaces_are_exact": r"e[+-]200"},
    "quadrature/test_combination.py": {
        "test_combinations_that_hold_parameters": "",
        "test_exact": r"diagonal",
        "test_traces_that_do_not_matter_may_be_undefined": "",
    },
    "testing/test_operator_check.py": {
        "test_every_class_is_drawn": "",
        "test_generated_operators_are_right_and_their_oracle": "",
    },
    "traces/test_adaptive.py": {"test_compiled_and_not_compiled_agree": r"tags0"},
    "traces/test_custom.py": {
        "test_hutchpp_rebuilt_digit_for_digit": r"complex-(?!PyTree)",
    },
    "traces/test_leave_one_out.py": {
        "test_unbiased_by_enumeration": r"(xtrace|xnystrace)-5",
        "test_diagonals_and_norms_are_unbiased_by_enumeration": r"xdiag-5-4-2-True"
        r"|row_norms_squared-5-4|diagpp-5-3-2-True|xnysdiag",
        "test_leave_one_out": r"(1|2)-complex",
    },
    "test_autodiff.py": {
        "test_euler": r"complex-(hutch|na_)",
        "test_matvec_vjps_of_a_gradient": r"xnysdiag|xdiag|diagpp|na_hutchpp",
    },
    "test_batches.py": {
        "test_batches_change_no_number": r"spectral_density|normal|biharmonic|orthogonal",
    },
    "test_documents.py": {
        "test_examples_in_docstrings": r"^(?!(trace|diagonal|logdet|Estimate|pool)$)"
    },
    "test_exactness.py": {
        "test_a_rank_below_the_sketch": r"complex64|hutch.*-complex"
        r"|(diag|norm).*-float32",
        "test_low_precision_is_sketched_in_float32": r"hutch|diagpp|norm",
    },
    "test_properties.py": {
        "test_jvp_is_vjp_and_euler": r"hutchinson",
        "test_linear_in_the_scale": r"hutch",
        "test_same_key_same_answer_and_within_budget": r"hutch",
    },
    "test_settings.py": {
        "test_donation": r"deltashift|row_norms|xdiag",
        "test_exported": r"deltashift|slq|row_norms",
    },
}


def is_seldom(nodeid: str) -> bool:
    """Whether the table holds a test, as "tests/test_settings.py::test_donation[xdiag]"."""
    file, _, test = nodeid.removeprefix("tests/").partition("::")
    name, _, parameters = test.rstrip("]").partition("[")
    pattern = SELDOM.get(file, {}).get(name)
    return pattern is not None and re.search(pattern, parameters) is not None
