"""Which cases of a test each run has, and which only `make test-all` has: what costs is compiling."""

import os
import re

import pytest
from hypothesis import Phase, settings

__all__ = ["COSTLY", "LATER", "PROFILE", "marked", "settled", "waits"]

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "quick")
"""How long Hypothesis searches: ``quick`` in each run, ``all`` in `make test-all`, ``search`` for new examples."""


LATER = (
    "Lion",
    "RMSprop",
    "NAdam",
    "RAdam",
    "Adan",
    "AdEMAMix",
    "ScheduleFreeAdamW",
    "AdamH",
    "FISTA",
    "AdaBelief",
    "Sophia",
)
"""Rules that the others stand for in most tests: `make test` runs those of `OFTEN` for them, `make test-all` all."""

OFTEN = {
    "test_a_run_equals_the_witness": re.compile(r"array_api-numpy-float64-\w+-\d"),
    "test_every_row_on_every_shape": re.compile(r"numpy-(ScheduleFreeAdamW|AdamH)-0"),
    "test_bytes_per_parameter": re.compile(""),
    "test_every_step_is_that_of_pytorch": re.compile(""),
    "test_torch_goes_on_here": re.compile(r"numpy-[\w-]+-numpy"),
    "test_zeros_train_on_or_stand_still_whatever_is_switched": re.compile("AdamH.*numpy|numpy.*AdamH"),
}
"""Tests that `make test` runs for them, with the cases."""

COSTLY = {
    "tests/doors/test_optax_same.py": {"test_the_numbers_are_those_of_optax": "adafactor|adabelief|muon"},
    "tests/rules/test_quantized.py": {"test_engines_agree": "cpp-CAME"},
    "tests/step/test_commit.py": {
        "test_a_fault_at_any_call": "array_api|(numpy|cpp).*all-1",
        "test_a_signal_at_any_call": "array_api|numpy.*all-1|cpp.*all-3",
    },
    "tests/engines/cuda/test_cupy_streams.py": {"test_calls_on_any_streams_do_what_calls_on_one_do": "-[12]"},
    "tests/engines/cuda/test_cupy_ranks.py": {"test_ranks_compute_what_one_process_does": "LAMB"},
    "tests/rules/test_gallery.py": {"test_each_rule_equals_its_formula_in_each_engine": "numba|float32"},
    "docs/diagnose.md": {"examples": ""},
    "docs/functional.md": {"examples": ""},
    "tests/benchmarks/test_benchmark_gpu.py": {"test_every_table_is_written_and_who_cannot_run_is_left_out": ""},
    "tests/benchmarks/test_benchmarks.py": {
        "test_all_compute_what_ours_does": "",
        "test_contestants_that_do_not_fit_into_memory_take_turns_with_the_first": "",
        "test_the_doors_are_measured": "",
        "test_what_is_measured_and_what_is_made_of_it": "",
    },
    "tests/demo/test_demo.py": {
        "test_a_run_repeats": "",
        "test_every_rule_learns_from_the_same_start": "",
        "test_float16_with_a_loss_scale_is_as_accurate_as_float32": "",
    },
    "tests/doors/test_explicit_axes.py": {"test_a_sharded_run_is_that_of_one_device": ""},
    "tests/engines/cuda/test_cuda_compile.py": {
        "test_the_judge_compiles": "given_scale|None",
        "test_all_that_a_rule_can_have_around_it_compiles": "",
        "test_every_kernel_compiles": "Adafactor-float32-2|LARS|AdamW|SGD|Adam-",
    },
    "tests/engines/cuda/test_cuda_faults.py": {
        "test_faults_are_found": "swapped moments|beyond the end|too few|CAME",
        "test_without_a_fault_nothing_is_found": "CAME",
    },
    "tests/engines/cuda/test_cuda_planted.py": {"test_a_planted_fault_is_found": ""},
    "tests/engines/cuda/test_cudacpu.py": {"test_the_same_text_compiles_for_devices": "sm_75"},
    "tests/engines/cuda/test_cudacpu_faults.py": {
        "test_each_fault_is_found_with_its_line": "(part_of_a_barrier|never)-False",
    },
    "tests/engines/cuda/test_cupy.py": {
        "test_arrays_that_are_not_contiguous_or_not_aligned": "unaligned-CAME",
        "test_every_option_of_every_rule": "CAME",
        "test_gradients_in_another_dtype": "",
    },
    "tests/engines/cuda/test_cupy_groups.py": {"test_projections": ""},
    "tests/engines/cuda/test_cupy_strict.py": {
        "test_a_matrix_of_more_elements_than_32_bits_count": "",
        "test_the_nan_of_a_gpu_stays_nan": "",
    },
    "tests/engines/cuda/test_cupy_older.py": {
        "test_a_step_calls_as_many_functions_as_over_the_newest": "",
        "test_it_has_all_names_that_the_package_uses": "",
        "test_its_arrays_have_the_heads_that_are_known": "",
    },
    "tests/engines/cuda/test_gpu_alone.py": {"test_the_benchmark_for_a_gpu": "", "test_the_tests_for_a_gpu": ""},
    "tests/engines/cuda/test_sass.py": {"test_the_whole_table": ""},
    "tests/engines/numba/test_numba_cache.py": {
        "test_python_threads_that_compile_the_same_at_once": "",
        "test_a_fork_after_a_step": "3-numba",
        "test_python_threads_with_an_optimizer_each": "numba",
        "test_a_user_without_a_home": "",
        "test_code_for_another_processor_is_compiled_again": "",
        "test_compiled_code_that_was_damaged_is_compiled_again": "",
        "test_processes_that_fill_the_cache_at_once_are_all_right": "",
        "test_without_a_folder_to_write_nothing_is_kept": "",
    },
    "tests/engines/test_engines.py": {
        "test_thousands_of_tiny_tensors": "numpy",
        "test_blocks_of_any_size": "-[2-9]",
    },
    "tests/engines/test_engines_memory.py": {
        "test_awkward_values_pass_through_as_in_the_reference": "cpp-(CAME|LANS)",
        "test_layouts_change_no_bit_and_nothing_beside": "cpp-CAME",
        "test_zero_tensors": "cpp-CAME",
    },
    "tests/engines/test_lanes.py": {"test_kernels_of_another_dtype": "cpp", "test_reports_of_kernels": "cpp"},
    "tests/engines/test_memory.py": {"test_mixed_precision_with_all_around_it_allocates_little": "loss scale|cpp"},
    "tests/engines/test_stacked.py": {
        "test_as_the_layers_one_by_one": "(CAME|LANS|LARS|AdamW)-cpp",
        "test_jax_and_arrays_that_cannot_be_written": "",
        "test_the_functional_form_of_a_model_that_is_scanned": "",
    },
    "tests/engines/test_threads.py": {"test_what_has_run_is_let_go": "True"},
    "tests/engines/test_watching.py": {
        "test_watching_any_rule_changes_no_bit": "-[2-9]",
        "test_rules_with_little_to_do": "True-nothing-cpp|a slot that stays-cpp|a slot that counts-cpp",
    },
    "tests/fusion/test_ops.py": {
        "test_every_reduction_is_the_same_in_every_engine": "matrix-rank 4",
        "test_means_of_complex_numbers_reach_the_elements_in_every_engine": "",
        "test_nan_and_infinity_come_through": "",
        "test_norms_of_every_order": "inf",
        "test_reductions_of_reductions": "",
    },
    "tests/fusion/test_products.py": {"test_engines_compute_what_the_rule_says": "(cpp|numba)-.*-float32"},
    "tests/params/test_aliasing.py": {"test_a_gradient_may_be_its_own_parameter": "float16-.*-cpp"},
    "tests/ranks/test_around.py": {
        "test_arrays_of_jax": "",
    },
    "tests/ranks/test_exact.py": {
        "test_messages_are_counted": "rule3",
    },
    "tests/ranks/test_hostile.py": {"test_a_field_that_is_switched_on_cannot_move_the_cuts": "clip_unit_ratio"},
    "tests/ranks/test_jax.py": {"test_shardings_stay_and_norms_are_exact": ""},
    "tests/ranks/test_parts.py": {
        "test_a_rank_without_elements_meets_the_others_where_gradients_are_absent": "",
        "test_norms_are_those_of_whole_tensors": "LARS",
    },
    "tests/ranks/test_processes.py": {
        "test_all_processes_compute_what_one_does": "openmpi",
        "test_a_process_that_ends_ends_the_others": "",
        "test_nccl_over_the_stand_in": "",
        "test_sharded_parameters_of_pytorch": "",
        "test_the_transformer_has_the_same_losses_on_two_ranks": "",
    },
    "tests/ranks/test_together.py": {"test_a_step_that_one_rank_cannot_make_changes_nothing": "options[13]-a dtype"},
    "tests/rules/test_goldens.py": {"test_it_is_the_same_in_other_libraries": "jax|(_f64|groups|mults|skip).*strict"},
    "tests/rules/test_numbers.py": {
        "test_a_centred_gradient_of_one_column_is_exactly_zero": "cpp-1.0",
        "test_gradients_of_any_size": "(numpy|cpp).*float64",
    },
    "tests/rules/test_published.py": {
        "test_adafactor_of_optax_decays_without_its_lr_and_averages_whole_steps": "",
        "test_adafactor_of_pytorch_decays_by_its_lr_alone": "",
    },
    "tests/rules/test_rules.py": {
        "test_half_precision_has_masters_in_float32": "jax-float16",
        "test_a_complex_run_equals_the_witness": "jax",
        "test_a_run_equals_the_witness": "jax-float64|jax-float32-(Adafactor|CAME|LANS)",
        "test_half_precision_without_masters_keeps_state_in_float32_and_rounds_once": "jax",
    },
    "tests/rules/test_traceable.py": {"test_a_rule_passes_opaque_arrays": "float32-(t|numbers)"},
    "tests/rules/test_soap.py": {"test_on_a_gpu_it_runs_as_written": ""},
    "tests/saving/test_checkpoint.py": {"test_arrays_go_from_library_to_library": "jax"},
    "tests/saving/test_checkpoint_files.py": {"test_saving_needs_no_second_copy_of_the_state": ""},
    "tests/saving/test_importers.py": {"test_torch_goes_on_here": "jax"},
    "tests/saving/test_state.py": {
        "test_a_loaded_optimizer_goes_on_as_the_saved_one_would": "numpy-jax",
        "test_state_goes_from_library_to_library": "numpy-numpy-jax",
    },
    "tests/schedules/test_schedules.py": {"test_array_steps_equal_int_steps": "jax.numpy"},
    "tests/step/test_scaling.py": {
        "test_in_other_libraries_too": "jax",
        "test_the_functional_form_scales_clips_and_skips_as_the_optimizer": "True",
    },
    "tests/test_errors_later.py": {"test_loading": "None"},
    "tests/test_functional.py": {
        "test_jax_differentiates_through_steps": "CAME|LANS",
        "test_zeros_differentiate_to_finite_values": "LAMB",
    },
    "tests/test_projections.py": {
        "test_the_functional_form_and_other_libraries": "jax",
        "test_the_optimum_is_scipys": "hock|logistic|rosenbrock|phases|nonnegative_lasso",
    },
    "tests/test_wrong.py": {"test_monitor": "", "test_snapshots": ""},
    "tests/step/test_layers_skipped.py": {
        "test_a_scan": "",
        "test_arrays_that_are_replaced": "",
        "test_cupy_says_of_mixed_trees_what_the_host_says": "",
        "test_over_ranks_of_arrays_that_are_replaced": "",
        "test_the_functional_form": "jax",
    },
    "tests/testing/test_diagnose.py": {
        "test_a_lower_precision_inside_ends_the_search": "",
        "test_matrices_may_follow_another_rule": "",
        "test_nothing_of_the_users_is_written": "",
        "test_planted_faults_are_named": "sgd",
        "test_the_first_difference_has_its_place": "",
        "test_the_rule_that_is_found_does_the_same": "",
        "test_they_are_named_where_numbers_are_known": "",
        "test_trees_lists_and_given_gradients_are_taken": "",
        "test_values_that_are_not_finite_are_told": "",
        "test_what_follows_no_rule_is_said_to": "",
        "test_what_is_right_is_said_to_be": "dampeni|momentu1",
    },
    "tests/testing/test_diagnose_files.py": {
        "test_json_holds_everything": "",
        "test_the_command_writes_and_its_status_tells": "",
        "test_the_page_is_whole_and_needs_nothing_else": "",
    },
    "tests/testing/test_diagnose_goldens.py": {"test_published_systems_are_named": "timm_lion"},
    "tests/testing/test_testing.py": {
        "test_other_dtypes": "bfloat16|float16",
        "test_other_libraries_parameters_options_and_tensors_left_out": "",
        "test_the_fixture_runs_a_test_on_every_backend": "",
        "test_the_fixture_skips_what_is_not_there": "",
    },
}
"""By file and test, what takes the most time: the cases that only `make test-all` runs, as a pattern."""

_LATER = re.compile(rf"(?<![A-Za-z.])({'|'.join(LATER)})(?![A-Za-z])")


def waits(file, test, case):
    """Whether a case of a test is one that only `make test-all` runs: it costs, or others stand for its rule."""
    costly, often = COSTLY.get(file, {}).get(test), OFTEN.get(test)
    if costly is not None and re.search(costly, case):
        return True
    return bool(_LATER.search(case)) and not (often and often.search(case))


def marked(cases, quick, name=str):
    """The cases of a test, for `pytest.mark.parametrize`; those that are not quick are marked as slow.

    Parameters
    ----------
    cases : iterable of tuple
        The values of each case.
    quick : callable
        Takes a case's values, and says whether each run has it.
    name : callable
        Gives the name of a value.
    """
    return [
        pytest.param(*case, id="-".join(map(name, case)), marks=() if quick(*case) else pytest.mark.slow)
        for case in cases
    ]


def settled(number):
    """The settings of a random test: so many examples, the same in each run, of which `make test` tries a third.

    To search, the environment's ``EXAMPLES`` says how many there are, and they are new in each run.
    """
    wanted = os.environ.get("EXAMPLES")
    return settings(
        max_examples=int(wanted or (-(-number // 3) if PROFILE == "quick" else number)),
        derandomize=not wanted,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
    )
