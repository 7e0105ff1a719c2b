"""The n-gram oracle: a distribution, on the model's own positions, chosen without a look at validation."""

import dataclasses
import math

import numpy as np
import pytest

from experiments.batches import PackedExamples
from experiments.corpus import SPLITS, Corpus, load_corpus
from experiments.evaluation import EvaluationSplit, evaluate
from experiments.n_gram import ORDERS, NGramModel, best_baseline, mean_nats
from experiments.training import TrainingConfig, TrainingState
from experiments.transformer import causal_mask


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


def test_n_gram_probabilities_sum_to_one() -> None:
    """The interpolated model is a distribution after seen and unseen contexts."""
    model = NGramModel.fit([(0, 1, 2, 1, 3), (0, 2, 2, 3)], order=3, vocabulary_size=5)
    for context in ((0,), (1, 2), (4, 4), ()):
        total = math.fsum(model.probability(context, token) for token in range(5))
        assert total == pytest.approx(1, abs=50 * 2**-52)  # 5 terms of at most 10 operations each


def test_witten_bell_of_a_hand_example() -> None:
    """After "a": seen b twice and c once, two distinct; the unigrams below it have b 2/4 before smoothing."""
    a, b, c = 0, 1, 2
    model = NGramModel.fit([(a, b), (a, b), (a, c), (b, a)], order=2, vocabulary_size=3)
    # targets b, b, c, a: 4 tokens, 3 distinct; uniform 1/3
    unigram = (2 + 3 * (1 / 3)) / (4 + 3)
    assert model.probability((a,), b) == pytest.approx((2 + 2 * unigram) / (3 + 2), rel=8 * 2**-52)


@pytest.mark.parametrize("split", SPLITS)
def test_positions_are_those_of_the_model_s_loss(corpus: Corpus, split: str) -> None:
    """Example by example the same number of tokens, all and answers, as an evaluation counts."""
    examples = corpus.split(split)
    model = TrainingState(TrainingConfig(width=16, layer_count=1), corpus).model
    expected = evaluate(model, EvaluationSplit(split, PackedExamples(examples)), causal_mask)
    losses = best_baseline(corpus).model.losses(examples, 2)
    for name in ("example_id", "token_count", "answer_token_count"):
        assert np.array_equal(getattr(losses, name), getattr(expected, name))


def test_answer_losses_are_the_last_of_all_losses(corpus: Corpus) -> None:
    """The answer's sum is that of the tokens after the separator, the end token included."""
    example = corpus.split("validation")[0]
    model = best_baseline(corpus).model
    nats = model.token_losses(example.tokens, 3)
    losses = model.losses([example], 3)
    assert losses.answer_loss_sum[0] == math.fsum(nats[-len(example.answer) - 1 :])


def test_order_does_not_depend_on_the_validation_split(corpus: Corpus) -> None:
    """Without any validation example the same order is chosen, and the same loss found."""
    blind = dataclasses.replace(corpus, examples=corpus.split("train"))
    for answers_only in (False, True):
        chosen, blindly = (best_baseline(c, answers_only=answers_only) for c in (corpus, blind))
        assert chosen.order == blindly.order in ORDERS
        examples = corpus.split("validation")
        assert chosen.loss(examples) == blindly.loss(examples)


def test_mean_is_over_the_tokens_asked_for(corpus: Corpus) -> None:
    """All tokens, or answers; both as sum over number."""
    examples = corpus.split("validation")
    losses = best_baseline(corpus).model.losses(examples, 4)
    assert mean_nats(losses, False) == losses.loss_sum.sum() / losses.token_count.sum()
    assert mean_nats(losses, True) == losses.answer_loss_sum.sum() / losses.answer_token_count.sum()
