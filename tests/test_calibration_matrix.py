"""The matrix of the calibration: every fault, its controls, and what may never change between the parts."""

import dataclasses
from pathlib import Path

import pytest

from calibration.cell import Cell, Part
from calibration.matrix import MID_RUN_STEP, RUNS, cells, choices_of
from calibration.pairs import PAIRS, code_path, composed
from calibration.pool import Queue, in_order
from calibration.results import PARTS
from calibration.training import experiment_of
from experiments.code_path import HEALTHY
from experiments.experiment import configure
from experiments.faults import FAULTS, SEVERITIES, fault_named

HEALTHY_STEPS = 100_000  # at least, in the judged part


@pytest.mark.parametrize("part", PARTS)
def test_every_fault_is_there_in_every_severity_and_seed(part: Part) -> None:
    """One cell each."""
    found = [(c.name, c.severity, c.seed) for c in cells(part) if c.kind == "fault"]
    seeds = [run.seed for run in RUNS[part]]
    assert sorted(found) == sorted((f.name, s, seed) for f in FAULTS for s in SEVERITIES for seed in seeds)


@pytest.mark.parametrize("part", PARTS)
def test_every_fault_that_can_starts_mid_run_with_some_seed(part: Part) -> None:
    """And with another one at its own first step."""
    for fault in FAULTS:
        starts = {cell.start for cell in cells(part) if cell.faults == (fault.name,)}
        assert starts == ({None} if fault.starts_with_the_run else {None, MID_RUN_STEP}), fault.name


@pytest.mark.parametrize("part", PARTS)
def test_a_control_is_the_same_run_without_the_fault(part: Part) -> None:
    """Seed, architecture and length are equal, it is healthy, and it comes first."""
    before: dict[str, Cell] = {}
    for cell in cells(part):
        if cell.control:
            control = before[cell.control]
            assert (control.seed, control.architecture, control.steps) == (
                cell.seed,
                cell.architecture,
                cell.steps,
            )
            assert control.faults == ()
        before[cell.identity()] = cell


def test_the_control_of_an_accumulated_run_accumulates() -> None:
    """What a fault needs to show is no fault; what is the fault itself is not in the control."""
    assert choices_of(fault_named("accumulation_not_normalised"), "medium") == {"accumulation_count": 4}
    assert choices_of(fault_named("underfitting"), "medium") == {}


def test_the_judged_part_shares_neither_seed_nor_architecture() -> None:
    """With the part that the thresholds were tuned on."""
    tuning, judged = RUNS["tuning"], RUNS["judged"]
    assert {run.seed for run in tuning} & {run.seed for run in judged} == set()
    assert {run.architecture.name for run in tuning} & {run.architecture.name for run in judged} == set()


def test_the_judged_part_has_enough_healthy_steps() -> None:
    """Four events in so many steps have an upper bound of 9.154 (Poisson, 95%): below one in 10k."""
    assert sum(cell.steps for cell in cells("judged") if not cell.faults) >= HEALTHY_STEPS


@pytest.mark.parametrize("part", PARTS)
def test_every_cell_can_be_trained(part: Part) -> None:
    """Its settings are known and in range, its code path can be composed, its name is its own."""
    for cell in cells(part):
        configure(experiment_of(cell), cell.seed, ())
        path = code_path(cell.faults, cell.severity, cell.start)
        assert (path == HEALTHY) == (not cell.faults or all(map(is_setting, cell.faults)))
    assert len({cell.identity() for cell in cells(part)}) == len(cells(part))


def is_setting(name: str) -> bool:
    """The fault is a choice of configuration."""
    return fault_named(name).code_path(fault_named(name).medium) == HEALTHY


def test_a_pair_has_the_parts_of_both() -> None:
    """Each fault's own replacement, and nothing else."""
    assert len(PAIRS) >= 10
    path = composed(
        *(fault_named(name).active_path("medium", 9) for name in ("frozen_layer", "padding_in_loss"))
    )
    changed = {f.name for f in dataclasses.fields(path) if getattr(path, f.name) != getattr(HEALTHY, f.name)}
    assert changed == {"first_step", "update", "batch"}


def test_a_pair_of_alterations_makes_both() -> None:
    """One after the other."""
    seen: list[str] = []
    one, other = (
        dataclasses.replace(HEALTHY, alter_state=lambda run, word=word: seen.append(word)) for word in "ab"
    )
    composed(one, other).alter_state(None)  # type: ignore[arg-type]  # the two take no notice of the state
    assert seen == ["a", "b"]


@pytest.mark.parametrize(
    "names", [("frozen_layer", "weight_decay_too_strong"), ("padding_in_loss", "bad_batch")]
)
def test_faults_of_one_part_are_no_pair(names: tuple[str, str]) -> None:
    """Two updates can not both be made; two stretches of steps can not both be kept."""
    with pytest.raises(ValueError, match=r"both faults replace update|different steps"):
        composed(*(fault_named(name).active_path("medium", 9) for name in names))


def test_long_cells_go_first_and_a_cell_waits_for_its_control(tmp_path: Path) -> None:
    """A control that is not trained yet holds back only its own cells."""
    chosen = [c for c in cells("tuning") if c.seed == 0 and c.name in ("control", "overfitting", "gelu")]
    queue = Queue(in_order(chosen), tmp_path)
    taken = list(iter(queue.next, None))
    assert [cell.kind for cell in taken] == ["control"] * 3 + ["negative"]
    removed: list[str] = []
    for cell in taken:
        queue.finish(cell, removed.append)
    overfitting = list(iter(queue.next, None))
    assert {cell.name for cell in overfitting} == {"overfitting"}
    control = overfitting[0].control
    assert control not in removed
    for cell in overfitting:
        queue.finish(cell, removed.append)
    assert removed.count(control) == 1
