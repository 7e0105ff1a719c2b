"""The verb-grammar corpus: every form of 20 verbs in English and Spanish, enumerated from two tables.

``data/verbs.csv`` and ``data/forms.csv`` hold every form in full, so that a person can read and
correct them. A cell is (verb, tense, person); each cell gives two examples, one a task.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

DATA_DIRECTORY = Path(__file__).parent / "data"

TENSE_TAGS = {
    "infinitive": "inf",
    "present simple": "pres",
    "past simple": "past",
    "past participle": "part",
    "simple future": "fut",
}
"""Tense as the label says it -> as an inflection prompt says it."""
PERSONS = {"first": "1", "second": "2", "third": "3"}
SPLITS = ("train", "validation", "held_out_verbs")
PRIMARY_SPLIT = "validation"
DIRECTIONS = ("english_to_spanish", "spanish_to_english")
LABELS = (
    "verb",
    "tense",
    "person",
    "task",
    "language",
    "regularity",
    "spanish_regularity",
    "ambiguous",
    "answer",
)

SPECIAL_TOKENS = ("<pad>", "<begin>", "<end>", "<separator>")
PAD, BEGIN, END, SEPARATOR = range(len(SPECIAL_TOKENS))

SPLIT_SEED = 20
"""Apart from the training seed: runs with other seeds are compared on the same splits."""
HELD_OUT_VERBS_PER_REGULARITY = 2
VALIDATION_CELL_COUNT = 24  # a tenth of the 240 cells of the other 16 verbs


@dataclass(frozen=True)
class Cell:
    """One place of the paradigm, with its form in each language."""

    verb: str
    spanish_verb: str
    tense: str
    person: str
    english: str
    spanish: str
    regularity: str
    spanish_regularity: str

    def key(self) -> tuple[str, str, str]:
        """(verb, tense, person)."""
        return self.verb, self.tense, self.person


@dataclass(frozen=True)
class Example:
    """One token sequence: begin, prompt, separator, answer, end."""

    example_id: int
    split: str
    prompt: str
    answer: str
    labels: Mapping[str, str]
    tokens: tuple[int, ...]

    def content_hash(self) -> int:
        """64-bit hash of the full token sequence."""
        digest = hashlib.blake2b(np.array(self.tokens, dtype="<i2").tobytes(), digest_size=8)
        return int.from_bytes(digest.digest(), "little")


@dataclass(frozen=True)
class Corpus:
    """All examples in the order of the tables, and the symbol of each token."""

    examples: tuple[Example, ...]
    vocabulary: tuple[str, ...]
    direction: str
    split_seed: int

    def split(self, name: str) -> tuple[Example, ...]:
        """The examples of one split."""
        return tuple(example for example in self.examples if example.split == name)

    def context_length(self) -> int:
        """Positions that the longest sequence needs: all its tokens but the last, which is only a target."""
        return max(len(example.tokens) for example in self.examples) - 1

    def content_hash(self) -> str:
        """Hex digest over every example's split and tokens, in order."""
        digest = hashlib.blake2b(digest_size=16)
        for example in self.examples:
            digest.update(f"{example.split} {example.content_hash():016x}\n".encode())
        return digest.hexdigest()

    def manifest(self) -> dict[str, Any]:
        """A JSON document that pins the data: seed, counts per split, vocabulary and hash of the whole."""
        return {
            "direction": self.direction,
            "split_seed": self.split_seed,
            "splits": {name: _counts(self.split(name)) for name in SPLITS},
            "vocabulary": list(self.vocabulary),
            "content_hash": self.content_hash(),
        }

    def example_columns(self) -> dict[str, list[Any]]:
        """The rows of the log's table ``examples``: id, split, hash and every label, by column."""
        columns: dict[str, list[Any]] = {
            "example_id": [example.example_id for example in self.examples],
            "split": [example.split for example in self.examples],
            "content_hash": [example.content_hash() for example in self.examples],
        }
        return columns | {name: [example.labels[name] for example in self.examples] for name in LABELS}


def load_corpus(direction: str = DIRECTIONS[0], split_seed: int = SPLIT_SEED) -> Corpus:
    """The corpus of both tables, split by ``split_seed``.

    "english_to_spanish" inflects English and translates into Spanish; "spanish_to_english" the
    other way round. Raises ValueError for any other direction.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction: {direction!r}; choose one of {', '.join(DIRECTIONS)}")
    cells = read_cells()
    split_of = assign_splits(cells, split_seed)
    ambiguous = ambiguous_spanish_forms(cells)
    texts = [(cell, *text) for cell in cells for text in _texts(cell, direction)]
    vocabulary = _vocabulary(prompt + answer for _, _, prompt, answer in texts)
    token_of = {symbol: token for token, symbol in enumerate(vocabulary)}
    examples = tuple(
        Example(
            example_id=index,
            split=split_of[cell.key()],
            prompt=prompt,
            answer=answer,
            labels=_labels(cell, task, answer, ambiguous),
            tokens=_tokens(prompt, answer, token_of),
        )
        for index, (cell, task, prompt, answer) in enumerate(texts)
    )
    return Corpus(examples, vocabulary, direction, split_seed)


def read_cells() -> tuple[Cell, ...]:
    """The 300 cells of the tables, verb by verb, tense by tense, person by person."""
    verbs = {row["verb"]: row for row in _read_table("verbs.csv")}
    return tuple(
        Cell(
            verb=row["verb"],
            spanish_verb=verbs[row["verb"]]["spanish_verb"],
            tense=row["tense"],
            person=person,
            english=row[f"english_{digit}"],
            spanish=row[f"spanish_{digit}"],
            regularity=verbs[row["verb"]]["english_regularity"],
            spanish_regularity=verbs[row["verb"]]["spanish_regularity"],
        )
        for row in _read_table("forms.csv")
        for person, digit in PERSONS.items()
    )


def assign_splits(cells: Iterable[Cell], split_seed: int) -> dict[tuple[str, str, str], str]:
    """Cell key -> split; both tasks of a cell share it.

    Two regular and two irregular verbs are held out whole. Each of the others gives one cell to
    validation, and half of them (8 of 16) a second one. Places (tense, person) are dealt in turn from
    one shuffled deck of 15: each is used once or twice, and a verb's two places are neighbours in the
    deck, hence distinct.
    """
    generator = np.random.default_rng(split_seed)
    regularity_of = {cell.verb: cell.regularity for cell in cells}
    held_out = _choose_held_out_verbs(regularity_of, generator)
    verbs = generator.permutation([verb for verb in regularity_of if verb not in held_out]).tolist()
    places = generator.permutation([(tense, person) for tense in TENSE_TAGS for person in PERSONS]).tolist()
    dealt = zip(itertools.islice(itertools.cycle(verbs), VALIDATION_CELL_COUNT), itertools.cycle(places))
    validation = {(verb, tense, person) for verb, (tense, person) in dealt}
    return {cell.key(): _split(cell, held_out, validation) for cell in cells}


def _split(cell: Cell, held_out: set[str], validation: set[tuple[str, str, str]]) -> str:
    if cell.verb in held_out:
        return "held_out_verbs"
    return "validation" if cell.key() in validation else "train"


def _choose_held_out_verbs(regularity_of: Mapping[str, str], generator: np.random.Generator) -> set[str]:
    chosen: set[str] = set()
    for regularity in ("regular", "irregular"):
        verbs = [verb for verb, value in regularity_of.items() if value == regularity]
        chosen.update(generator.permutation(verbs)[:HELD_OUT_VERBS_PER_REGULARITY].tolist())
    return chosen


def ambiguous_spanish_forms(cells: Iterable[Cell]) -> frozenset[str]:
    """Spanish forms that stand in more than one cell, such as "yo fui" (be and go)."""
    counts = Counter(cell.spanish for cell in cells)
    return frozenset(form for form, count in counts.items() if count > 1)


def _texts(cell: Cell, direction: str) -> list[tuple[str, str, str]]:
    """(task, prompt, answer) of the cell's two examples."""
    tag = f"{TENSE_TAGS[cell.tense]} {PERSONS[cell.person]}"
    if direction == "english_to_spanish":
        lemma, inflected, translated = cell.verb, cell.english, cell.spanish
    else:
        lemma, inflected, translated = cell.spanish_verb, cell.spanish, cell.english
    return [("inflection", f"{lemma} {tag}", inflected), ("translation", inflected, translated)]


def _labels(cell: Cell, task: str, answer: str, ambiguous: frozenset[str]) -> dict[str, str]:
    """Values of LABELS. ``ambiguous`` says whether a Spanish form in the sequence stands in two cells."""
    language = "english" if answer == cell.english else "spanish"
    has_spanish = task == "translation" or language == "spanish"
    return {
        "verb": cell.verb,
        "tense": cell.tense,
        "person": cell.person,
        "task": task,
        "language": language,
        "regularity": cell.regularity,
        "spanish_regularity": cell.spanish_regularity,
        "ambiguous": "yes" if has_spanish and cell.spanish in ambiguous else "no",
        "answer": answer,
    }


def _vocabulary(texts: Iterable[str]) -> tuple[str, ...]:
    return SPECIAL_TOKENS + tuple(sorted(set("".join(texts))))


def _tokens(prompt: str, answer: str, token_of: Mapping[str, int]) -> tuple[int, ...]:
    return (
        BEGIN,
        *(token_of[character] for character in prompt),
        SEPARATOR,
        *(token_of[character] for character in answer),
        END,
    )


def _counts(examples: tuple[Example, ...]) -> dict[str, Any]:
    return {
        "example_count": len(examples),
        "target_token_count": sum(len(example.tokens) - 1 for example in examples),
        "verbs": sorted({example.labels["verb"] for example in examples}),
    }


def _read_table(name: str) -> list[dict[str, str]]:
    with (DATA_DIRECTORY / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
