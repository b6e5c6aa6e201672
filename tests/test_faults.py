"""Where each fault that outsiders found is kept from coming back: its number -> the tests.

Tests that stand alone carry the number in their name (test_N1_...); this table finds the others.
"""
import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FOUND = {
    "G1": "step.a_group_that_is_no_axis_of_the_mesh_is_refused mesh.every_group_says_its_axes",
    "G2": "step.a_step_without_a_mesh_is_taken_on_the_models step.another_mesh_is_refused",
    "G3": "step.deferred_weight_passes_equal_one_process",
    "G4": "nn.containers_are_walked optim.refuses_nothing_to_train",
    "G5": "step.every_rank_can_gather_what_one_stage_holds",
    "G6": "data.what_is_taken_first_does_not_matter",
    "G7": "comm.in_a_loop_nothing_stays_on_mpi "
          "mesh.300_meshes_and_100_wrapped_models_leave_nothing "
          "tensor.changes_are_forgotten_when_their_memory_dies",
    "G8": "house.imports_stay_within_the_rules house.there_is_no_circle",
    "G9": "kit.patched_reaches_the_plan_of_tensor_parallelism_and_the_algorithms",
    "G10": "data.what_is_not_there_is_not_counted_or_spelled "
           "threads.a_world_without_ranks_is_refused",
    "G11": "placement.a_missing_gradient_is_zeros_of_the_piece",
    "G12": "verify.many_steps_of_any_optimizer_hold_the_bound "
           "data.default_text_is_the_same_on_every_python",
    "N8": "verify.gradients_that_cancel_are_no_difference "
          "verify.a_gradient_one_part_in_a_billion_too_large_on_one_rank",
    "D1": "step.backward_without_a_step_equals_one_process",
    "D4": "step.nothing_is_left_over_from_a_step_that_failed",
    "D5": "comm.closing_a_stream_raises_the_error_that_nobody_has_seen",
    "L10": "failures.it_ends_in_time_and_says_why doctor.a_launcher_of_another_mpi_is_found_out",
}
BY_NAME = ("N1 N2 N3 N4 N5 N6 N7 D2 D3 C1 C2 C3 C4 C5 "
           "L1 L2 L3 L4 L5 L6 L7 L8 L9 L11 L12 L13 L14 L15 L16 L17 "
           "F1 F2 F3 F4 F5 F6").split()
ROWS = dict(G=12, N=8, D=5, C=5, L=17, F=6)              # how many of each were found
# Kinds of faults from public reports on other systems, D01 to D41.
KINDS = {
    "D01": "dp.unequal_token_counts",
    "D02": "pp.neither_micro_batches_nor_calls_scale_the_gradients",
    "D03": "mappings.backward_is_the_adjoint "
           "mappings.all_gather_sums_what_every_rank_did_with_my_number",
    "D04": "placement.norm_with_a_replicated_and_a_sharded_gradient "
           "placement.norm_on_a_mesh_is_the_norm_of_the_whole",
    "D05": "placement.norm_over_pipeline_stages pp.the_norm_is_that_of_all_stages "
           "zero.sizes_5_1_7",
    "D07": "pp.a_tied_embedding_is_held_by_both_ends pp.training_equals_one_process",
    "D11": "nn.masks_differ_where_they_must functional.masks_are_pieces_of_one_mask",
    "D14": "zero.sizes_5_1_7 zero.bytes_held_between_steps_are_those_of_the_formula",
    "D16": "pp.no_layer_is_lost",
    "D17": "ring.chunks_follow_array_split collectives.every_algorithm_gives_the_serial_answer",
    "D18": "schedules.every_schedule_is_complete_ordered_and_matched "
           "pp.training_equals_one_process pp.live_activations_in_bytes_of_the_engine",
    "D19": "collectives.every_algorithm_with_synchronous_sends cp.a_hop_cannot_block",
    "D20": "dp.frozen_unused_and_rarely_used_parameters dp.used_on_one_rank_only "
           "dp.what_nobody_uses_is_not_moved_by_adamw",
    "D21": "failures.it_ends_in_time_and_says_why",
    "D22": "pp.a_message_of_another_micro_batch_is_an_error "
           "pp.the_same_model_trains_again_after_a_step",
    "D23": "flash.large_scores flash.a_masked_key_never_wins flash.merge_on_one_number",
    "D25": "comm.messages_travel_in_pieces_below_the_limit",
    "D26": "collectives.strided_inputs functional.inputs_and_gradients_in_any_layout",
    "D27": "readme.first_command_is_the_one_whose_output_is_shown "
           "launch.without_mpi_a_command_says_what_to_install",
    "D28": "offload.equal_to_resident_bit_for_bit zero.the_gpt "
           "zero.stage_2_holds_no_more_than_a_few_buckets",
    "D30": "optim.decay_is_for_matrices_only zero.the_gpt",
    "D33": "checkpoint.D32_D33_going_on_elsewhere_is_the_same_training "
           "tp.D13_initial_weights_do_not_depend_on_the_number_of_ranks",
    "D35": "ep.any_routing ep.ranks_without_tokens moe.an_idle_expert_has_a_gradient_of_zeros",
    "D36": "ep.training_equals_one_process ep.each_token_counts_once_for_an_expert",
    "D37": "moe.auxiliary_losses_reach_the_router "
           "ep.the_balance_loss_weighs_the_same_however_often_it_is_taken",
    "D38": "tensor.gradient_is_the_central_difference",
    "D39": "tensor.value_used_on_two_paths tensor.one_tensor_used_often "
           "tensor.long_chains_need_no_recursion tensor.backward_twice_on_fresh_graphs_adds",
    "D41": "simulate.the_two_ratios_of_one_example simulate.idle_slots_counted_in_the_lists",
}
KINDS_BY_NAME = "D06 D08 D09 D10 D12 D13 D15 D24 D29 D31 D32 D34 D40".split()


@functools.cache
def names():
    """List all tests.  -> {'step.a_group_that_is_...', ...}"""
    found = set()
    for path in TESTS.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.add(f"{path.stem[5:]}.{node.name[5:]}")
    return found


def test_every_row_has_its_tests():
    assert sorted([*FOUND, *BY_NAME]) == sorted(
        f"{letter}{i + 1}" for letter, rows in ROWS.items() for i in range(rows))


def test_every_kind_has_its_tests():
    assert sorted([*KINDS, *KINDS_BY_NAME]) == [f"D{i + 1:02}" for i in range(41)]


@pytest.mark.parametrize("number", [*FOUND, *KINDS])
def test_the_table_names_tests_that_exist(number):
    assert set((FOUND | KINDS)[number].split()) <= names()


@pytest.mark.parametrize("number", [*BY_NAME, *KINDS_BY_NAME])
def test_a_test_carries_the_number(number):
    assert any(re.search(rf"\.{number}_", name) for name in names())
