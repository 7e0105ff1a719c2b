"""The correctness oracle: its gate and its numbers, from small runs."""

import dataclasses
import math
from pathlib import Path

import pytest

from experiments import train_mini
from experiments.corpus import Corpus, load_corpus
from experiments.experiment import EXPERIMENTS_DIRECTORY, load_experiment
from experiments.n_gram import best_baseline
from experiments.train_mini import losses_by_step, report
from experiments.training import TrainingConfig

CONFIG = TrainingConfig(total_steps=4, warmup_steps=1, evaluation_interval=2, width=16, layer_count=1)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three runs of four steps, which have learned next to nothing."""
    out = tmp_path_factory.mktemp("mini")
    train_mini.train_mini(load_experiment("18-train-mini"), CONFIG, out, overwrite=False)
    return [out / f"seed-{seed}" for seed in range(3)]


def test_gate_is_missed_by_runs_that_have_not_learned(
    runs: list[Path], corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, and the word for it."""
    assert report(runs, corpus) == 1
    assert "gate 0.7: worst ratio" in (text := capsys.readouterr().out)
    assert text.count("MISSED") == 1


def test_gate_holds_for_the_worst_seed_and_kind_of_token(
    runs: list[Path], corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passed just above the worst ratio, missed just below it."""
    worst = 0.0
    for answers_only, columns in (
        (False, ["loss_sum", "token_count"]),
        (True, ["answer_loss_sum", "answer_token_count"]),
    ):
        baseline = best_baseline(corpus, answers_only=answers_only)
        reference = math.exp(baseline.loss(corpus.split("validation")))
        last = [math.exp(losses_by_step(run, "validation", columns)[-1][1]) for run in runs]
        worst = max(worst, *(loss / reference for loss in last))
    for limit, code in ((worst * 1.001, 0), (worst * 0.999, 1)):
        monkeypatch.setattr(train_mini, "PERPLEXITY_RATIO_LIMIT", limit)
        assert report(runs, corpus) == code


def test_held_out_verbs_are_shown_at_their_best_and_last_evaluation(
    runs: list[Path], corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four rows; answer losses weighted by tokens give the split's own."""
    report(runs, corpus)
    lines = capsys.readouterr().out.split("held_out_verbs, answers")[1].splitlines()[2:]
    assert [line.split()[:2] for line in lines] == [
        [task, regularity]
        for task in ("inflection", "translation")
        for regularity in ("regular", "irregular")
    ]
    assert all("(4)" in line for line in lines)  # these short runs are best at their end


def test_seeds_follow_the_one_that_was_asked_for(tmp_path: Path) -> None:
    """Three runs, one directory each."""
    config = dataclasses.replace(CONFIG, seed=5, total_steps=1)
    train_mini.train_mini(load_experiment("18-train-mini"), config, tmp_path, overwrite=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["seed-5", "seed-6", "seed-7"]


def test_committed_report_passed_the_gate_with_the_n_gram_of_today(corpus: Corpus) -> None:
    """The n-gram perplexities in the report are what this code computes."""
    text = (EXPERIMENTS_DIRECTORY / "18-train-mini" / "README.md").read_text(encoding="utf-8")
    for answers_only in (False, True):
        baseline = best_baseline(corpus, answers_only=answers_only)
        perplexity = math.exp(baseline.loss(corpus.split("validation")))
        assert f"order {baseline.order}: n-gram {perplexity:.3f}" in text
    assert "passed" in text and "MISSED" not in text
