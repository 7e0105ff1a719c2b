"""What the peers' rules say of a cell, read in their favour."""

from __future__ import annotations

from collections.abc import Iterable

from calibration.outcome import Outcome
from calibration.peers import PEER_RULES
from calibration.scores import HEALTHY, Answer, truth

RULE_SETS = tuple(dict.fromkeys(rule.rule_set for rule in PEER_RULES))


def fired_of(outcome: Outcome, rule_set: str) -> list[str]:
    """The set's rules that fired."""
    names = {rule.name for rule in PEER_RULES if rule.rule_set == rule_set}
    return [name for name in outcome.peer_rules if name in names]


def peer_answer(rule_set: str) -> Answer:
    """The right cause first whenever some fired rule leads to it; else what the first fired rule leads to.

    These rules name symptoms and rank nothing: whoever reads them picks the cause. A rule that leads to no
    fault of ours says its own name.
    """

    def answer(outcome: Outcome) -> tuple[str, ...]:
        fired = [rule for rule in PEER_RULES if rule.name in fired_of(outcome, rule_set)]
        if any(fault in rule.finds for rule in fired for fault in outcome.faults):
            return (truth(outcome),)
        return tuple(rule.finds[0] if rule.finds else rule.name for rule in fired)

    return answer


def alarmed(outcomes: Iterable[Outcome], rule_set: str) -> int:
    """Cells on which some rule of the set fired."""
    return sum(bool(fired_of(outcome, rule_set)) for outcome in outcomes)


__all__ = ["HEALTHY", "RULE_SETS", "alarmed", "fired_of", "peer_answer"]
