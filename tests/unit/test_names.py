"""Names of the library's first version that nobody could read are gone and do not come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[2] / "lightning_osdp"
FILES = sorted(LIBRARY.rglob("*.py"))

BANNED_MODULE_NAMES = """
AGAIN AHEAD_SHARE ALONE_BYTES APPLYING_S AtBatchSize BEAT_S BatchRule BetweenNodes BetweenSteps Block Bounds Box
CAP_MEMORY CHOSEN_ODD CHOSEN_SECONDS CORES Checkpoints Checkup Choice Connections Copies Cores DIRECT_BYTES
DRAWN DeferredSignals Desk Desks EvenlyEnding Excess Exchange FARTHER FEWEST FEW_OPERATORS FILLING_S
FIRST_SEARCH FORMAT FURTHER Found FrontierPoint Frozen GARBAGE GRACE_S Gather GatherBound Group GroupCosts
Groups Heap HeapUse HostReads Initialiser Inside Joined KEPT_LARGER KEPT_LEFT_S KEPT_SHARE Keeping KnownSteps
LESS LONGEST_S LONG_S LONG_SECONDS LOOK_AT_GRADIENTS Layout Levels Limit Limits Line Lines MARGIN MODES_LEFT_S
MOST MOST_CUTS MOST_FACTOR MOST_FOUND MOST_KEPT_BYTES MOST_REHEARSED MOST_SETTLED MOST_VECTORS MOST_WAYS
Measurements Menu ModelDescription NEAR_NAMES NEXT_TO_NOTHING NORMAL NOT_HERE NO_HEAP NO_WISHES NoBound ODD
OF_A_KIND OUTSIDE OneStage Order Outcome PACKED_BYTES PAGED_PER_TABLE_BYTE PAIRED_ROWS PARTINGS PARTS
PIECES_AT_ONCE PIECE_BYTES PLAIN_S PLENTY_BYTES POLISHED_WAYS POLISHES Part Parts Pending Product REFINEMENTS
REFUSED RIGHT ROOM ROOM_FOR_LARGEST Ranks RanksStrategy Reasons Recipe Recurring Reducer Reduction Rehearsal
Repeated Replicas Room RowCosts Rows Run SAFER_SHARE SAME_BYTES SAME_PACE SAME_ROOM SECONDS SECTIONS SETTLE_S
SHARES SHORT_S SILENT_S SMALL_GATHER_BYTES START_S STEP_BYTES STEP_LEFT_S STRETCHES Saving SavingStrategy Scope
Scratch SearchEnd Settled Shards Shared Side Source Space Spans SplitOperator Stage StepClock StepsKept
Stopwatch Stretch TEAM TOGETHER TOGETHER_BYTES TURNS Table Target Team Timed Times Took Trace TrainerView
TwoStage UNSEEN_GAIN Unit Units Updates View WAITED WARM_UP WISHES WORTH_HIDING WORTH_KEEPING WORTH_TRYING
WORTH_UPDATING Watch WatchedStrategy Wire Wishes _Beside _Choosing _Counts _Exchange _Found _Freeing _LOST
_Lives _Parts _Planning _Search _Stepped _Subject _WATCHED _alike _as_plain _beside _best _better _between_s
_collected _compose _connections _dual _end _end_with_parent _exchanged _exchanges _facts _fastest _filling
_finished _first _fits _half_way _here _hidden _hooks_look _in_turns _is_shortage _kept _kind _kind_of _known
_lasting _leave _less _lifted _lowest _margin _may_exceed _means _meeting _mixtures _more_per_sample _more_s
_most_along _name _near _nearest _obstacle _of_others _on _on_copy _once_s _one_by_one _one_line_errors _one_of
_pieces _plain _plainest_first _prices _ready _reduce_pieces _reduced _reduced_at_once _reduced_together
_rehearsed _repeats _room _rule_of _search_wishes _short _slower _still _still_true _stored _tell _time_after
_together _turned _undecided _uniform _unit_s _up_to_training _wanted _ways _why_not _why_pinned _worth advice
alike all_gather_together allowance as_rehearsed asked at_once bare_plan begin begin_all_gather
begin_reduce_scatter best_uniform blocks_of boxes_of call can_keep_heap check_in_backward check_same choose
cluster_of communication configured copied_bytes copies copy_bytes count_whole_gradients counts_peaks decided
defer describe describe_recipe describe_together drifted drop_source_lines duplicate engine excess exchange
explained finish fitted_s fitting_optimizer_state flat_range foreseen forget found_above found_at fuse fused
granularities handed_back_and_kept hardware held_memory hidden holders hull_steps in_backward in_turns_s instant
is_ours joined kept kept_batch_size kept_randomness key_of kinds largest_of_ranks lasting_levels latest leaf
learn least_room line look_at_all_ranks look_up looks_of loss_of made_up margin_bytes may_fuse measure
measure_and_plan measure_levels measure_share measured menu names never node_layout not_for_the_model nothing
nothing_fits of_first_rank of_plan on_all_ranks one_of operators_of overhead own_run parts_of plan_alone
plan_for plan_recipe plans polish positive predicted_now problem_of problem_on product_of put_in_place
read_recipe real_copy reasons recompute recover reduce_copy reduce_scatter_together refuse rehearse
rehearse_alone rehearse_chosen rehearse_kept rehearsed_compute relax release_unused remember resize rising
rounded run_without_cuda runs_ahead scales seconds_between settled settled_before sharding_groups sharers
silenced smallest_rows staying_tensors still_right stretches_of table_of this_cluster time_some timed total
trace_real transferred typical_s undominated waits_for_step watched way_of ways weights why_not_in_backward
with_excess with_remedies
"""
"""Classes, functions and constants of modules."""

BANNED_MEMBERS = """
across added added_s again ahead ahead_bytes all_here allowed alone always_begun amid_backward any apart
as_before as_shown at before_accumulation begun best best_two between between_s block_s bound_s bounds bytes
came change changed collect collected collecting decide drop each_s earlier_plan edge end end_backward error
every_recomputed excluded faster fetched file_bytes files find fix follow foreseen_s forget_loader forget_slices
found gathers give_gradient grown guessed guessed_bytes hand_back handle held hold in_recomputed inside is_first
is_whole joining_s joins keep keeping_heap keeps kept_compute known labels largest_update late least
least_and_most left_s let_go levels lines long lower_s make_whole may_run_ahead menu_of more_s narrow now of
once_s only_hidden outside outside_s own_rings pages_to_come pairs part part_of pending pinned place polished
price_s_per_byte products ran_out reads refined rehearsals rehearsed repeatable reread rerun rest resumed_from
room room_bytes room_seen rows rows_of running_ahead saved saving search_wishes separable shard_ready 
shown_whole spare spread stand_in steps streamed take_gradient take_in taken_bytes takes tell tick times took_s
turn two_levels two_stage under uneven update updated updates updating_in_backward used used_by used_bytes
vectors waited_s whole whole_parameters whole_shapes why_fixed wished wishes writers
"""
"""Public methods, properties and fields of classes."""

BANNED_FILES = """
alone checkup copies instants keeping levels local measurements namesake rehearsal repeats saving settings shortage
team training watched batches bounds candidates groups joining labels nodes peak reasons rehearsed remedies runs
schedule settled space timeline topology units wishes arguments blocks fakes moments_of reads scopes splits standins
timing ahead boxes gathers lines norms overhead pending products replicas sharded streaming updates without_cuda
"""
"""Modules; ``strategy/arguments.py`` is another one."""

BANNED_WORDS = {
    "desk",
    "rehearse",
    "rehearsal",
    "rehearsals",
    "rehearsed",
    "settled",
    "wish",
    "wishes",
    "foreseen",
    "hurried",
}
"""Parts of any name, local variables and arguments included."""


def module_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def member_names(tree: ast.Module) -> Iterator[str]:
    for kind in ast.walk(tree):
        for node in kind.body if isinstance(kind, ast.ClassDef) else ():
            if isinstance(node, ast.FunctionDef):
                yield node.name
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.target.id


def all_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute):
            yield node.attr


def words_of(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(LIBRARY)))
def test_library_file_has_no_banned_name(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert sorted(set(module_names(tree)) & set(BANNED_MODULE_NAMES.split())) == []
    assert sorted(set(member_names(tree)) & set(BANNED_MEMBERS.split())) == []
    assert not {name for name in all_names(tree) if words_of(name) & BANNED_WORDS}
    assert path.stem not in set(BANNED_FILES.split()) - {"arguments"}


def test_banned_names_are_found_in_each_place() -> None:
    tree = ast.parse("class Desk:\n    left_s: int\n    def let_go(self): pass\nODD, MOST = 1, 2\ndef f(wishes): pass")
    assert set(module_names(tree)) & set(BANNED_MODULE_NAMES.split()) == {"Desk", "ODD", "MOST"}
    assert set(member_names(tree)) & set(BANNED_MEMBERS.split()) == {"left_s", "let_go"}
    assert {name for name in all_names(tree) if words_of(name) & BANNED_WORDS} == {"Desk", "wishes"}
