"""Which tests the README's command leaves to `python -m pytest -m slow`, beside those that
are marked where they stand: each takes a second or more, or has many twins, and a quicker
test of the same rule stays. CI runs them all.

Of a test's twins, the same with other parameters, the first stays, and of the others a
third, as a checksum of their names falls, but for files whose tests take no time.
"""

import re
import zlib

NO_TIME = r"test_house|test_documents|test_messages|test_site|test_main"

# By file, test and a pattern of its parameters, which is empty where all are meant.
SELDOM = {
    "calculus/test_biharmonic.py": {
        "test_all_pairs_are_exact": r"complex",
        "test_batches_of_points_pytrees_and_leaks": "",
        "test_error_bars_are_honest_where_nested_ones_are_not": "",
    },
    "calculus/test_calculus.py": {
        "test_a_flow": "",
        "test_a_hessian_diagonal_is_sketched_where_that_is_better": "",
        "test_every_operation_has_its_second_derivative": r"solver|branch|complex parts"
        r"|determinant|modulus|loop|checkpoint|transform|bits|order",
        "test_inside_a_loop_inside_a_batch": "",
        "test_networks": "",
        "test_second_order_of_a_laplacian": "",
    },
    "calculus/test_gauss_newton.py": {
        "test_they_are_the_dense_matrices_and_semidefinite": "",
    },
    "calculus/test_sketched.py": {
        "test_it_is_used_from_ten_directions_on_and_where_it_can_be": "",
        "test_networks_in_float32_in_a_batch_in_a_loop_without_leaks": "",
        "test_values_and_slopes_are_unbiased_and_bars_honest": "",
        "test_what_the_sketch_spans_is_exact_value_slope_and_bar": "",
    },
    "core/test_failures.py": {
        "test_hashing": r"PyTree|Jacobian|row_norms|xtrace-nested",
        "test_transposition": r"(Function|Tangent|Add|Mul|Neg|Div|Composed|Tridiagonal"
        r"|Diagonal|Identity)-complex|xdiag-.*-float",
    },
    "core/test_pool.py": {
        "test_a_batch_is_its_list_also_under_jit_with_its_slope": "",
        "test_pools_are_as_honest_as_their_parts": "",
    },
    "estimators/test_leaf_traces.py": {
        "test_in_a_batch_in_a_loop_without_leaks_in_float32_at_any_scale": "",
        "test_unbiased_with_honest_bars_and_slopes": "",
    },
    "estimators/test_norms.py": {"test_rectangular": ""},
    "estimators/test_second_batch_of_diagonals.py": {
        "test_it_is_exact_where_either_is": r"complex128-(semi|symm)|float32-gen",
        "test_the_gradient_reads_what_the_value_read": r"poly",
        "test_the_mean_over_all_probes_and_lots": r"complex",
    },
    "functions/test_arnoldi.py": {
        "test_exact_from_n_applications": r"complex|normal|triangular|convection|multiple",
        "test_exact_or_not": "",
        "test_intervals_and_mean_slopes": "",
        "test_readings_against_explicit_projectors": "",
    },
    "functions/test_block_diagonal.py": {"test_derivatives_are_unbiased": ""},
    "functions/test_functions.py": {
        "test_diagonals_of_functions": "",
        "test_diagonals_of_functions_with_colours": "",
        "test_float32_while_x64_is_on": "",
        "test_gradients_of_operator_and_parameters": r"slq",
        "test_inside_transformations": "",
        "test_plain_quadrature_is_exact_from_n_steps_of_n_probes": "",
        "test_second_derivative_of_a_scaled_logarithm": "",
        "test_several_traces_from_one_run": r"arnoldi",
    },
    "functions/test_likelihood.py": {
        "test_a_solve_that_falls_short_shows": "",
        "test_derivatives_of_the_solution": "",
        "test_diagonal_shifts": "",
        "test_inside_transformations": "",
        "test_operators_without_a_transpose": "",
    },
    "functions/test_logdet.py": {
        "test_a_batch_and_a_loop": "",
        "test_a_second_derivative_that_no_probe_matters_to": "",
        "test_recurrences_that_stop_short_are_visible_in_second_derivatives": "",
    },
    "functions/test_schatten.py": {
        "test_rectangular": r"shape0",
        "test_special_operators": "",
    },
    "linalg/test_krylov.py": {"test_derivatives_of_functions_of_matrices": r"values[01]"},
    "linalg/test_two_left_out.py": {"test_replicates": r"float-True"},
    "probes/test_colouring.py": {
        "test_colours_to_spare_are_used": "",
        "test_triangles_of_roads": "",
    },
    "probes/test_meters.py": {
        "test_batches_are_shown_once_and_change_nothing": r"slq|biharmonic|hutchinson_diag"
    },
    "probes/test_witnesses.py": {"test_intervals_hold": ""},
    "quadrature/test_block_quadrature.py": {
        "test_better_than_plain_quadrature_where_few_eigenvalues_have_the_sum": "",
        "test_error_bars_where_a_kernel_exhausts_its_space": "",
        "test_error_bars_where_single_precision_exhausts_a_space": "",
        "test_exhausted_spaces_are_exact": r"e[+-]200",
    },
    "quadrature/test_combination.py": {
        "test_combinations_that_hold_parameters": "",
        "test_exact": r"diagonal",
        "test_linear_combinations_are_those_of_functions": "",
        "test_thermal_means_and_their_gradients": "",
        "test_traces_that_do_not_matter_may_be_undefined": "",
    },
    "testing/test_operator_check.py": {
        "test_every_class_is_drawn": "",
        "test_generated_operators_are_right_and_their_oracle": "",
    },
    "estimators/test_adaptive.py": {
        "test_batches_and_loops": "",
        "test_compiled_and_not_compiled_agree": "",
    },
    "estimators/test_custom.py": {
        "test_hutchpp_rebuilt_agrees_to_rounding": r"complex-(?!PyTree)",
    },
    "estimators/test_deltashift.py": {
        "test_it_lives_in_a_training_loop": "",
        "test_what_changes_and_is_no_array_is_not_overlooked": "",
    },
    "estimators/test_leave_one_out.py": {
        "test_diagonals_and_norms_are_unbiased_by_enumeration": r"xdiag-5-4-2-True"
        r"|row_norms_squared-5-4|diagpp-5-3-2-True|xnysdiag",
        "test_leave_one_out": r"(1|2)-complex",
        "test_unbiased_by_enumeration": r"(xtrace|xnystrace)-5",
    },
    "test_autodiff.py": {
        "test_euler": r"complex-(hutch|na_)",
        "test_matvec_vjps_of_a_gradient": r"xnysdiag|xdiag|diagpp|na_hutchpp",
    },
    "test_batches.py": {
        "test_batches_change_no_number": r"spectral_density|normal|biharmonic|orthogonal",
        "test_batches_inside_loops": "",
    },
    "test_devices.py": {
        "test_blocks_stay_where_they_are": "",
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
        "test_the_front_door_on_small_operators_is_exact": "",
    },
    "test_settings.py": {
        "test_donation": r"deltashift|row_norms|xdiag",
        "test_exported": r"deltashift|slq|row_norms",
    },
    "test_site.py": {
        "test_programs_run": "",
    },
    "test_transforms.py": {
        "test_diffrax": "",
        "test_pytrees_of_mixed_precision": "",
    },
}


def is_seldom(nodeid: str) -> bool:
    """Whether the table holds a test, as "tests/test_settings.py::test_donation[xdiag]"."""
    file, _, test = nodeid.removeprefix("tests/").partition("::")
    name, _, parameters = test.rstrip("]").partition("[")
    pattern = SELDOM.get(file, {}).get(name)
    return pattern is not None and re.search(pattern, parameters) is not None


def is_spare_twin(nodeid: str) -> bool:
    """Of those that are not the first."""
    takes_time = re.search(NO_TIME, nodeid) is None
    return takes_time and zlib.crc32(nodeid.encode()) % 3 != 0
