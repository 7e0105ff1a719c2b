"""Explain a rule: what it asks, its evidence, thresholds, sources, remedy and SQL. Without a name: list all.

analyzer explain causal_mask_absent
"""

from __future__ import annotations

import argparse
import difflib

from analyzer.errors import AnalyzerError
from analyzer.exit_codes import FINE
from analyzer.output import emit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``analyzer explain``."""
    parser.add_argument("fault", nargs="?", metavar="FAULT", help="name of a rule; without it, list all")


def run(arguments: argparse.Namespace) -> int:
    """Print one rule, or the list of all."""
    from analyzer.diagnoses.document import explanation, index
    from analyzer.diagnoses.registry import DIAGNOSES

    if arguments.fault is None:
        emit(index())
        return FINE
    rules = {diagnosis.name: diagnosis for diagnosis in DIAGNOSES}
    if arguments.fault not in rules:
        near = difflib.get_close_matches(arguments.fault, rules, n=3)
        next_action = f"did you mean {', '.join(near)}?" if near else "list them with: analyzer explain"
        raise AnalyzerError(f"{arguments.fault}: no such rule; {next_action}")
    emit(explanation(rules[arguments.fault]))
    return FINE
