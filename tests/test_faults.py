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
KINDS = "D08 D09 D10 D13 D15 D24".split()               # kinds of faults in other systems


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


@pytest.mark.parametrize("number", FOUND)
def test_the_table_names_tests_that_exist(number):
    assert set(FOUND[number].split()) <= names()


@pytest.mark.parametrize("number", [*BY_NAME, *KINDS])
def test_a_test_carries_the_number(number):
    assert any(re.search(rf"\.{number}_", name) for name in names())
