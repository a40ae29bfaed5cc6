"""Tests are of the tree that megafx is of. Of parametrized tests that take long, one in so many cases runs by default, others
with `--slow`."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest

# Where the environment (a container's) keeps Python from writing down what it compiled, each process that a test starts
# compiles 60,000 lines of megafx: 0.8 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

import megafx.api  # noqa: E402  tests rely on all being imported: ops are declared where they are defined

_PACKAGE, _ROOT = Path(megafx.__file__).resolve().parents[1], Path(__file__).resolve().parents[1]
if _PACKAGE != _ROOT:  # the package itself refuses where its parts are of two trees
    raise pytest.UsageError(f"these tests are of {_ROOT}, but megafx of {_PACKAGE}\n  fix: pip install -e {_ROOT}")

gc.freeze(), gc.set_threshold(10_000)  # cycles are looked for seldom, and not among modules, which stay: 3% of the time

# pytest gives its handlers to every logger that does not propagate, and torch writes down all it does as soon as this one has
# any: 3% of the time.
logging.getLogger("torch.__trace").addHandler = lambda handler: None  # type: ignore[method-assign]

os.environ["MEGAFX_CACHE"] = "off"  # each test compiles what it looks at, and nothing goes to the user's folder

# Test -> n: one in n of its cases runs by default, the first of every n. What is left out so took two fifths of the time of
# the whole suite.
ONE_IN: dict[str, int] = {
    "analysis/test_communication_counts.py::test_nothing_is_communicated_twice": 2,
    "analysis/test_memory.py::test_a_block_keeps_what_the_formulas_say": 9,
    "analysis/test_memory.py::test_what_is_predicted_is_what_graphs_hold": 4,
    "capture/test_checkpointing.py::test_flags_of_hugging_face_keep_the_inputs_of_layers": 2,
    "capture/test_expert_loops.py::test_loop_over_hits": 4,
    "capture/test_export.py::test_graph_computes_what_the_model_does": 6,
    "capture/test_functions.py::test_a_gradient_of_its_own_is_kept": 2,
    "capture/test_hf_attention.py::test_masks_are_flags": 16,
    "capture/test_hf_attention.py::test_packed_positions_with_and_without_a_cache": 12,
    "capture/test_hf_inputs.py::test_loss_and_gradients": 8,
    "capture/test_layerdrop.py::test_ranks_of_data_parallelism_drop_the_same_layers": 3,
    "capture/test_like_layers.py::test_copies_are_what_layers_would_trace": 5,
    "capture/test_like_layers.py::test_models": 4,
    "capture/test_short_sequences.py::test_short_sequences_are_exact": 4,
    "capture/test_small_sizes.py::test_each_call_gets_what_eager_mode_computes": 6,
    "checkpoint/test_checkpoint.py::test_a_background_save_that_failed_is_told_at_the_end": 3,
    "checks/test_mesh.py::test_all_ranks_of_a_mesh_compute_what_one_process_does": 3,
    "checks/test_mesh.py::test_types_of_the_outer_axis_find_each_lost_transition": 2,
    "checks/test_negative_controls.py::test_the_type_checker_finds_each_deleted_transition": 2,
    "checks/test_negative_controls.py::test_the_type_checker_finds_each_transition_from_a_wrong_placement": 2,
    "checks/test_numbers.py::test_the_pipeline_changes_no_numbers": 2,
    "checks/test_rehearsal.py::test_a_fault_of_one_place_is_found": 2,
    "checks/test_rehearsal_of_stages.py::test_a_collective_that_one_rank_of_a_stage_leaves_out": 2,
    "checks/test_rehearsal_of_stages.py::test_two_sends_that_one_stage_swaps": 3,
    "checks/test_rules.py::test_no_row_is_wrong_and_none_is_missing": 2,
    "compiler/test_cuda_graphs.py::test_replayed_steps_are_bit_equal": 6,
    "compiler/test_lazy_outputs.py::test_never_from_changed_weights": 4,
    "compiler/test_lazy_outputs.py::test_no_logits_in_a_training_step": 2,
    "compiler/test_lazy_outputs.py::test_off": 2,
    "compiler/test_lazy_outputs.py::test_same_as_eager": 2,
    "compiler/test_pipeline.py::test_a_planned_program_is_compiled_to_what_its_capture_is": 8,
    "dist/test_failure.py::test_a_fault_inside_of_an_exchange": 2,
    "distributed/test_collectives.py::test_a_transition_changes_no_logical_value_nor_gradient": 3,
    "distributed/test_collectives.py::test_its_expansion_means_the_same": 8,
    "equivalence/experts/test_expert_units.py::test_experts_that_see_all_tokens": 4,
    "equivalence/experts/test_expert_units.py::test_whole_experts_on_each_rank": 12,
    "equivalence/experts/test_experts.py::test_experts_are_split_in_their_ffn": 4,
    "equivalence/experts/test_experts.py::test_experts_are_split_over_ranks_where_an_override_asks": 4,
    "equivalence/experts/test_group_experts.py::test_ranks_compute_what_eager_does": 20,
    "equivalence/experts/test_group_experts.py::test_the_price_decides": 3,
    "equivalence/experts/test_index_dispatch.py::test_form": 12,
    "equivalence/experts/test_own_experts.py::test_experts_that_need_one_reduction_have_one": 3,
    "equivalence/experts/test_own_experts.py::test_form": 12,
    "equivalence/experts/test_own_experts.py::test_one_reduction_for_the_whole_mixture": 2,
    "equivalence/experts/test_own_experts.py::test_other_mixtures": 8,
    "equivalence/experts/test_own_experts.py::test_what_is_refused": 2,
    "equivalence/test_batch_norm.py::test_is_exact_on_shards_of_channels": 3,
    "equivalence/test_block_mask_arguments.py::test_all_ranks_compute_what_one_process_does": 6,
    "equivalence/test_context.py::test_all_ranks_compute_what_one_process_does": 6,
    "equivalence/test_context.py::test_each_collective_of_attention_with_a_sink_matters": 2,
    "equivalence/test_context.py::test_ids_may_have_no_batch_dim": 10,
    "equivalence/test_context.py::test_sinks_are_of_all_keys": 8,
    "equivalence/test_context.py::test_tokens_may_meet_in_other_ways": 3,
    "equivalence/test_data_parallel.py::test_a_step_sends_each_gradient_once": 3,
    "equivalence/test_elements.py::test_gradients_through_topk": 2,
    "equivalence/test_equivalence.py::test_awkward_shapes": 12,
    "equivalence/test_equivalence.py::test_dropout_draws_the_same_masks_at_any_degree": 12,
    "equivalence/test_equivalence.py::test_sharded_equals_one_process": 24,
    "equivalence/test_exchanged_heads.py::test_all_ranks_compute_what_one_process_does": 8,
    "equivalence/test_exchanged_heads.py::test_each_exchange_matters": 2,
    "equivalence/test_exchanged_heads.py::test_masks_are_of_the_heads_that_a_rank_has": 12,
    "equivalence/test_fixed_and_symbolic_sizes.py::test_loss_and_gradients_are_eagers": 12,
    "equivalence/test_flex_attention.py::test_functions_of_elements_are_attention_by_position": 27,
    "equivalence/test_flex_attention.py::test_other_functions_are_exact_too": 3,
    "equivalence/test_key_value_heads.py::test_every_rank_has_query_heads_and_numbers_are_eagers": 12,
    "equivalence/test_losses.py::test_a_loss_of_elements_is_computed_on_shards": 12,
    "equivalence/test_losses.py::test_a_weighted_loss_is_eagers_with_a_sharded_vocabulary": 4,
    "equivalence/test_memory.py::test_strides_that_differ_from_the_traced_ones": 6,
    "equivalence/test_memory.py::test_writes": 2,
    "equivalence/test_moving_elements.py::test_loss_and_gradients_are_eagers": 60,
    "equivalence/test_op_db.py::test_ops_that_were_wrong": 3,
    "equivalence/test_packing.py::test_documents_are_segments_on_any_ranks": 24,
    "equivalence/test_patterns_in_models.py::test_a_family_changes_no_number_and_no_collective": 12,
    "equivalence/test_patterns_in_models.py::test_no_mask_has_queries_and_keys": 8,
    "equivalence/test_patterns_in_models.py::test_what_is_left_in_eval": 8,
    "equivalence/test_patterns_in_models.py::test_what_is_left_in_training": 24,
    "equivalence/test_random_plans.py::test_random_plans_are_exact": 3,
    "equivalence/test_sharded_data_parallel.py::test_a_step_sends_what_the_formula_says": 2,
    "equivalence/test_sharded_data_parallel.py::test_all_ranks_compute_what_one_process_does": 2,
    "equivalence/test_sizes_from_data.py::test_on_ranks": 2,
    "equivalence/test_sizes_from_data.py::test_one_graph_for_all_numbers": 8,
    "equivalence/test_transformer_options.py::test_option": 24,
    "equivalence/test_unlisted_models.py::test_a_selective_scan_of_two_dtypes": 2,
    "equivalence/test_unlisted_models.py::test_frequencies_are_written_into_a_complex_tensor": 2,
    "equivalence/test_unlisted_models.py::test_patches_take_the_places_of_tokens": 2,
    "equivalence/test_unlisted_models.py::test_types_confirm_what_is_exact": 16,
    "equivalence/test_unlisted_models.py::test_windows_are_as_many_as_a_ceiling_says": 2,
    "equivalence/test_varlen.py::test_every_collective_of_packed_rows_matters": 3,
    "equivalence/test_varlen.py::test_other_statistics_are_those_of_whole_heads": 2,
    "equivalence/test_varlen.py::test_packed_rows_are_attention_with_segments": 6,
    "equivalence/test_varlen.py::test_what_segments_cannot_say_is_sharded_over_heads": 3,
    "house/test_errors.py::test_an_unusual_model_is_right": 2,
    "house/test_errors.py::test_fewer_heads_than_ranks": 2,
    "kernels/test_dropout.py::test_statistics": 3,
    "kernels/test_fused_ops.py::test_gradients_are_those_of_the_value": 3,
    "kernels/test_fused_ops.py::test_launchers_are_traced_with_symbolic_sizes": 6,
    "kernels/test_fused_ops.py::test_one_graph_for_every_batch": 6,
    "kernels/test_fused_ops.py::test_torchs_checks_of_operators": 3,
    "models/test_expert_parallel.py::test_whole_experts_on_each_rank": 2,
    "models/test_matrix.py::test_cell_is_exact": 12,
    "passes/backward/test_scaled_heads.py::test_it_is_the_same_on_any_number_of_ranks": 4,
    "passes/backward/test_scaled_heads.py::test_the_head_changes_by_the_option_and_is_named": 2,
    "passes/backward/test_scaled_heads.py::test_two_losses_may_have_one_head_and_logits_are_those_of_the_weight": 2,
    "passes/backward/test_scaled_products.py::test_it_is_the_same_on_any_number_of_ranks": 4,
    "passes/backward/test_scaled_products.py::test_what_backward_reads_as_it_is_is_not_kept_in_fp8_too": 2,
    "passes/backward/test_store_activation_inputs.py::test_a_quarter_less_is_kept_than_in_bf16": 2,
    "passes/backward/test_store_activation_inputs.py::test_it_is_the_same_on_any_number_of_ranks": 4,
    "passes/canonicalize/test_canonicalize_draws.py::test_draws_are_functions_of_the_seed": 3,
    "passes/communicate/test_schedule_collectives.py::test_each_backward_collective_of_a_block_has_a_product_beside_it": 2,
    "passes/communicate/test_schedule_collectives.py::test_regathered_inputs_trade_bytes_for_memory": 2,
    "passes/communicate/test_whole_layers.py::test_two_layers_of_weights_and_one_of_gradients_are_whole": 3,
    "passes/experts/test_capacity_experts.py::test_as_one_process": 2,
    "passes/experts/test_dispatch_experts.py::test_as_one_process": 4,
    "passes/experts/test_group_by_expert.py::test_as_one_process": 4,
    "passes/experts/test_group_by_expert.py::test_whole_experts_on_tensor_parallel_ranks": 2,
    "passes/experts/test_stack_lists.py::test_as_one_process": 2,
    "passes/experts/test_stack_lists.py::test_context_parallel_ranks_compute_their_own_tokens": 2,
    "passes/fuse/test_describe_masks.py::test_causal_masks_are_flags": 2,
    "passes/fuse/test_fuse.py::test_fused_graphs_have_the_collectives_of_unfused_ones": 2,
    "passes/fuse/test_fuse.py::test_ranks_compute_the_same": 12,
    "passes/fuse/test_fuse_linear_loss.py::test_compiled_forward_and_backward": 2,
    "passes/fuse/test_merge_linears.py::test_ranks_compute_what_one_does": 6,
    "passes/fuse/test_share_logsumexp.py::test_compiled": 3,
    "passes/localize/test_localize_shapes.py::test_pads_stay_off_poles": 6,
    "passes/lower/test_fuse_maxima.py::test_a_model": 2,
    "passes/lower/test_overlap_products.py::test_products_of_fp8_overlap_alike": 2,
    "passes/lower/test_start_exchanges.py::test_as_one_process": 3,
    "passes/plan/test_flatten_tokens.py::test_gathers_and_scatters_copy_nothing": 6,
    "passes/plan/test_flatten_tokens.py::test_numbers_are_those_of_one_process": 3,
    "passes/plan/test_plan_sharding.py::test_sequence_parallelism_that_is_not_had_is_told": 3,
    "passes/plan/test_plan_sharding.py::test_styles_of_all_weights": 12,
    "passes/plan/test_selected_rows.py::test_each_rank_gives_experts_its_own_tokens": 2,
    "passes/recompute/test_choose_kept.py::test_a_larger_budget_keeps_the_promise_and_never_takes_longer": 2,
    "passes/recompute/test_choose_kept.py::test_same_bits_at_some_budgets": 4,
    "passes/recompute/test_choose_kept.py::test_same_bits_with_each_option": 6,
    "passes/recompute/test_choose_kept.py::test_the_choice_is_near_the_least_time_of_all": 2,
    "passes/recompute/test_distribute.py::test_ranks_keep_parts_of_the_inputs_of_layers": 3,
    "passes/recompute/test_offload.py::test_the_same_bits_come_back": 6,
    "patterns/test_attention.py::test_dropout_on_more_than_four_dims": 4,
    "patterns/test_attention.py::test_every_form": 12,
    "patterns/test_attention.py::test_scores_in_fp32": 2,
    "patterns/test_attention.py::test_sharded": 2,
    "patterns/test_bias_activation.py::test_every_form_of_a_linear": 4,
    "patterns/test_glu.py::test_every_form": 6,
    "patterns/test_masked_softmax.py::test_casts": 3,
    "patterns/test_norms.py::test_sums_and_norms": 2,
    "patterns/test_norms.py::test_written_layer_norms": 8,
    "patterns/test_norms.py::test_written_rms_norms": 6,
    "patterns/test_sinks.py::test_sinks_are_operands_of_attention_on_any_ranks": 9,
    "patterns/test_softmax_of_sinks.py::test_half_precision_with_sinks_of_either_dtype": 6,
    "patterns/test_softmax_of_sinks.py::test_spellings_are_attention": 3,
    "planner/test_fusion_profile.py::test_every_chain_has_what_it_measures": 3,
    "planner/test_fusion_profile.py::test_numbers_do_not_depend_on_the_choice": 2,
    "planner/test_optimum.py::test_elimination_finds_the_optimum_of_the_integer_program": 8,
    "planner/test_overrides.py::test_what_they_make_is_right": 2,
    "report/test_report.py::test_a_browser_draws_every_level": 4,
    "report/test_report.py::test_a_page_is_small_whole_and_offline": 6,
    "report/test_report.py::test_a_step_adds_up": 3,
    "report/test_report.py::test_a_trace_is_the_modelled_step": 2,
    "report/test_report.py::test_inputs_without_gradient_are_data": 2,
    "report/test_report.py::test_the_costed_graph_is_the_plan": 3,
    "report/test_report.py::test_what_backward_keeps_is_at_most_what_is_said": 2,
    "report/test_search_experts.py::test_a_layout_with_shared_experts_is_priced_as_its_plan": 2,
    "rules/test_dtensor.py::test_what_dtensor_allows_is_allowed": 4,
    "rules/test_inference.py::test_rows_are_inferred_and_nothing_false_is": 10,
    "runtime/test_call_structures.py::test_adapters_that_come_late": 2,
    "runtime/test_direct_calls.py::test_a_part_on_simulated_ranks": 4,
    "runtime/test_kept_casts.py::test_micro_batches_share_casts_to_the_bit": 2,
    "runtime/test_main_grad.py::test_an_optimizer_that_would_fail_midway_is_told_before": 2,
    "runtime/test_main_grad.py::test_sums_are_not_rounded_to_bf16": 3,
    "runtime/test_main_grad.py::test_what_else_takes_gradients": 2,
    "runtime/test_parallel_object.py::test_verify_of_other_outputs": 3,
    "runtime/test_program_cache.py::test_a_damaged_entry_is_made_anew": 3,
    "runtime/test_program_cache.py::test_what_forward_reads_makes_an_entry_of_its_own": 2,
    "runtime/test_verify_outputs.py::test_a_fault_of_the_runtime_is_found": 3,
    "weights/test_initialize.py::test_every_rank_gets_slices_of_eagers_values": 3,
    "weights/test_load.py::test_every_rank_reads_its_slices": 3,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        test = item.nodeid.partition("[")[0].removeprefix("tests/")
        if test in ONE_IN and item.get_closest_marker("slow") is None:
            cases[test].append(item)
    for test, every in cases.items():
        for i, item in enumerate(every):
            if i % ONE_IN[test]:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Failures are named as they happen: a run that ends at a time limit prints no summary."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None and not hasattr(config, "workerinput"):  # not in a worker of xdist
        config.pluginmanager.register(_Failures(reporter))


class _Failures:
    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self.reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.reporter.write_line(f"\n{report.when} of {report.nodeid} failed")


@pytest.fixture(autouse=True)
def _one_call_verified(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`megafx.verify` makes one call in tests that are not marked `repeated_calls`: they look at sharding, and at a third of
    the time."""
    equivalence = sys.modules.get("megafx.equivalence")
    if equivalence is not None and request.node.get_closest_marker("repeated_calls") is None:
        monkeypatch.setattr(equivalence, "repeat", lambda call, trial: equivalence.Repeated())
