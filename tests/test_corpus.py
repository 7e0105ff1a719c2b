"""The corpus: its tables, examples, splits, pinned manifest and reference losses."""

import json
import math
from collections import Counter

import pytest

from experiments.corpus import (
    BEGIN,
    DATA_DIRECTORY,
    DIRECTIONS,
    END,
    LABELS,
    PAD,
    PERSONS,
    SEPARATOR,
    SPLITS,
    TENSE_TAGS,
    Corpus,
    Example,
    ambiguous_spanish_forms,
    load_corpus,
    read_cells,
)
from experiments.reference_losses import (
    prefix_tree_entropy,
    reference_losses,
    unigram_entropy,
)

REGULAR_ENDINGS = {
    "ar": {
        "present simple": ("o", "as", "a"),
        "past simple": ("é", "aste", "ó"),
        "past participle": ("ado",) * 3,
    },
    "er": {
        "present simple": ("o", "es", "e"),
        "past simple": ("í", "iste", "ió"),
        "past participle": ("ido",) * 3,
    },
}
REGULAR_ENDINGS["ir"] = REGULAR_ENDINGS["er"]  # they differ in the plural only


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


def test_every_cell_of_the_paradigm_is_there_once() -> None:
    """20 verbs x 5 tenses x 3 persons, each with one form in each language."""
    cells = read_cells()
    expected = {(verb, t, p) for verb in {c.verb for c in cells} for t in TENSE_TAGS for p in PERSONS}
    assert len({c.verb for c in cells}) == 20
    assert len(cells) == 300
    assert {c.key() for c in cells} == expected


def test_twelve_verbs_are_regular_in_english() -> None:
    """Regularity is labelled for each language: eat is irregular, comer is regular."""
    regularity = {c.verb: (c.regularity, c.spanish_regularity) for c in read_cells()}
    assert Counter(english for english, _ in regularity.values()) == {"regular": 12, "irregular": 8}
    assert regularity["eat"] == ("irregular", "regular")
    assert regularity["play"] == ("regular", "irregular")


def test_every_english_form_is_unique() -> None:
    """Pronoun and carrier make each of the 300 English forms stand for one cell only."""
    assert len({c.english for c in read_cells()}) == 300


def test_spanish_ambiguities_are_the_shared_preterite_of_ser_and_ir() -> None:
    """The only Spanish forms of two cells are those of "was" and "went"."""
    assert ambiguous_spanish_forms(read_cells()) == {"yo fui", "tú fuiste", "él fue"}


def test_regular_spanish_verbs_follow_the_rule_and_irregular_ones_break_it() -> None:
    """Each verb's label agrees with an independent statement of the regular endings."""
    follows: dict[str, bool] = {}
    labels = {c.spanish_verb: c.spanish_regularity for c in read_cells()}
    for cell in read_cells():
        person = list(PERSONS).index(cell.person)
        rule = REGULAR_ENDINGS[cell.spanish_verb[-2:]]
        regular = {
            "infinitive": cell.spanish_verb,
            "simple future": cell.spanish_verb + ("é", "ás", "á")[person],
        } | {tense: cell.spanish_verb[:-2] + endings[person] for tense, endings in rule.items()}
        agrees = cell.spanish.split()[-1] == regular[cell.tense]
        follows[cell.spanish_verb] = follows.get(cell.spanish_verb, True) and agrees
    assert {verb for verb, ok in follows.items() if ok} == {v for v, r in labels.items() if r == "regular"}


def test_regular_english_verbs_follow_the_rule_and_irregular_ones_break_it() -> None:
    """Past tense and participle in -ed (-ied after a consonant and y) are what "regular" says."""
    cells = read_cells()
    past = {c.verb: c.english.split()[-1] for c in cells if c.tense == "past simple"}
    participle = {c.verb: c.english.split()[-1] for c in cells if c.tense == "past participle"}
    regular_past = {verb: verb + ("d" if verb.endswith("e") else "ed") for verb in past} | {
        "study": "studied"
    }
    follows = {verb for verb in past if past[verb] == participle[verb] == regular_past[verb]}
    assert follows == {c.verb for c in cells if c.regularity == "regular"}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_each_form_is_the_answer_of_one_example_per_cell(direction: str) -> None:
    """300 English and 300 Spanish answers, in either direction."""
    examples = load_corpus(direction).examples
    assert Counter(e.labels["language"] for e in examples) == {"english": 300, "spanish": 300}
    answers = sorted(e.answer for e in examples)
    assert answers == sorted(form for c in read_cells() for form in (c.english, c.spanish))


def test_prompts_are_the_lemma_or_the_english_form(corpus: Corpus) -> None:
    """English by inflection from lemma, tense and person; Spanish by translation from the English form."""
    texts = {(e.prompt, e.answer) for e in corpus.examples if e.labels["verb"] == "walk"}
    assert ("walk past 3", "he walked") in texts
    assert ("he walked", "él caminó") in texts


def test_opposite_direction_inflects_spanish() -> None:
    """spanish_to_english: Spanish by inflection, English by translation."""
    texts = {(e.prompt, e.answer) for e in load_corpus("spanish_to_english").examples}
    assert ("caminar past 3", "él caminó") in texts
    assert ("él caminó", "he walked") in texts


def test_sequence_is_begin_prompt_separator_answer_end(corpus: Corpus) -> None:
    """Tokens spell the example and hold each special token once, padding never."""
    for example in corpus.examples:
        start, separator = example.tokens.index(BEGIN), example.tokens.index(SEPARATOR)
        spelled = [corpus.vocabulary[token] for token in example.tokens]
        assert (start, example.tokens[-1]) == (0, END)
        assert "".join(spelled[1:separator]) == example.prompt
        assert "".join(spelled[separator + 1 : -1]) == example.answer
        assert PAD not in example.tokens


def test_ambiguous_label_marks_sequences_with_an_ambiguous_spanish_form(corpus: Corpus) -> None:
    """Translating into "yo fui" is marked; inflecting "I was" is not, since no Spanish is in it."""
    marked = {e.answer for e in corpus.examples if e.labels["ambiguous"] == "yes"}
    assert marked == {"yo fui", "tú fuiste", "él fue"}


def test_no_sequence_is_in_two_splits(corpus: Corpus) -> None:
    """Equal means the full token sequence; also, none occurs twice within a split."""
    assert len({e.tokens for e in corpus.examples}) == 600
    assert len({e.content_hash() for e in corpus.examples}) == 600


def test_splits_hold_whole_cells_and_whole_verbs(corpus: Corpus) -> None:
    """Both tasks of a cell share its split; held-out verbs appear nowhere else."""
    split_of: dict[tuple[str, ...], set[str]] = {}
    for e in corpus.examples:
        split_of.setdefault((e.labels["verb"], e.labels["tense"], e.labels["person"]), set()).add(e.split)
    assert all(len(splits) == 1 for splits in split_of.values())
    held_out = {e.labels["verb"] for e in corpus.split("held_out_verbs")}
    assert not held_out & {e.labels["verb"] for e in corpus.examples if e.split != "held_out_verbs"}


def test_split_sizes_and_strata(corpus: Corpus) -> None:
    """432, 48 and 120 examples; 2 + 2 verbs held out; each other verb and each place in validation."""
    assert {name: len(corpus.split(name)) for name in SPLITS} == {
        "train": 432,
        "validation": 48,
        "held_out_verbs": 120,
    }
    held_out = {(e.labels["verb"], e.labels["regularity"]) for e in corpus.split("held_out_verbs")}
    assert Counter(regularity for _, regularity in held_out) == {"regular": 2, "irregular": 2}
    validation = corpus.split("validation")
    assert len({e.labels["verb"] for e in validation}) == 16
    assert len({(e.labels["tense"], e.labels["person"]) for e in validation}) == 15


def test_split_seed_moves_the_splits() -> None:
    """Another split seed holds out other cells; the same seed holds out the same."""
    first, again, other = (load_corpus(split_seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert [e.split for e in first.examples] != [e.split for e in other.examples]


def test_data_manifest_is_pinned(corpus: Corpus) -> None:
    """The committed manifest is what the tables give: counts, vocabulary and hash of the whole.

    After a deliberate correction: python -m experiments corpus > experiments/data/manifest.json
    """
    pinned = json.loads((DATA_DIRECTORY / "manifest.json").read_text(encoding="utf-8"))
    assert corpus.manifest() == pinned


def test_every_example_carries_every_label(corpus: Corpus) -> None:
    """Label columns are complete, non-empty text, with the values written out."""
    columns = corpus.example_columns()
    assert set(columns) == {"example_id", "split", "content_hash", *LABELS}
    assert all(value for name in LABELS for value in columns[name])
    assert set(columns["tense"]) == set(TENSE_TAGS)
    assert set(columns["task"]) == {"inflection", "translation"}


def test_unknown_direction_is_refused() -> None:
    """The message names the choices."""
    with pytest.raises(ValueError, match="english_to_spanish, spanish_to_english"):
        load_corpus("sideways")


def test_prefix_tree_entropy_of_a_hand_example() -> None:
    """0-1-2, 0-1-3, 0-4-2: the split 2:1 after "0" and 1:1 after "0 1" cost, the rest is certain."""
    sequences = [(0, 1, 2), (0, 1, 3), (0, 4, 2)]
    nats = 2 * math.log(3 / 2) + math.log(3) + 2 * math.log(2)
    # fewer than ten float64 operations of size about 1: error below 10 * 2^-52
    assert prefix_tree_entropy(sequences) == pytest.approx(nats / 6, abs=10 * 2**-52)


def test_best_possible_causal_model_meets_the_floor_and_others_stay_above() -> None:
    """Any distribution per prefix scores at least the floor; the empirical one meets it."""
    sequences = [(0, 1), (0, 1), (0, 2)]
    losses = [-(2 * math.log(p) + math.log(1 - p)) / 3 for p in (0.1, 0.5, 0.6, 2 / 3, 0.7, 0.99)]
    floor = prefix_tree_entropy(sequences)
    assert min(losses) == pytest.approx(floor, abs=10 * 2**-52)  # as above
    assert losses.index(min(losses)) == 3


def test_unigram_entropy_of_a_hand_example() -> None:
    """Targets 1, 1, 2, 2 have an entropy of ln 2; the first token of a sequence is no target."""
    assert unigram_entropy([(9, 1, 2), (9, 1, 2)]) == pytest.approx(math.log(2), abs=4 * 2**-52)


def test_reference_losses_are_ordered(corpus: Corpus) -> None:
    """ln V > unigram > n-gram > floor on the primary split."""
    losses = reference_losses(corpus)
    assert losses.uniform == math.log(len(corpus.vocabulary))
    ordered = [losses.uniform, losses.unigram, losses.n_gram, losses.entropy_floor["validation"]]
    assert ordered == sorted(ordered, reverse=True)
    assert set(losses.entropy_floor) == set(SPLITS)


def test_content_hash_depends_on_tokens_only() -> None:
    """Two examples with the same tokens have the same hash, whatever their labels."""
    left = Example(0, "train", "a", "b", {}, (1, 5, 3, 6, 2))
    right = Example(7, "validation", "c", "d", {"verb": "x"}, (1, 5, 3, 6, 2))
    other = Example(0, "train", "a", "b", {}, (1, 5, 3, 6, 7))
    assert left.content_hash() == right.content_hash() != other.content_hash()
