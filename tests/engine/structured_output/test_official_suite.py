"""JSON Schema's own test suite says which values are valid; the grammar accepts none that is not.

https://github.com/json-schema-org/JSON-Schema-Test-Suite
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starling_engine.errors import InvalidRequest

from tests.engine.structured_output.matching import Matcher

WRONGLY_REFUSED = {
    "const": "a number of an integer's value, written with a point",
    "enum": "the same",
    "type": "the same",
    "format": "the suite takes formats for annotations; here they are enforced",
    "vocabulary": "a meta-schema that is never fetched switches keywords off",
}
"""Files with valid values that are not accepted, and why."""


@dataclass
class Outcome:
    schemas: int = 0
    taken: int = 0
    checks: int = 0
    wrong_accepts: list[tuple[str, Any]] = field(default_factory=list)
    wrong_refusals: list[tuple[str, str, Any]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def add(self, file: Path, case: dict[str, Any]) -> None:
        self.schemas += 1
        try:
            matcher = Matcher(case["schema"])
        except InvalidRequest as refusal:
            self.refusals.append(str(refusal))
            return
        self.taken += 1
        for test in case["tests"]:
            self.checks += 1
            accepted = matcher.accepts(test["data"])
            if accepted and not test["valid"]:
                self.wrong_accepts.append((case["description"], test["data"]))
            if test["valid"] and not accepted:
                self.wrong_refusals.append((file.stem, case["description"], test["data"]))


def outcome_of(files: Iterable[Path]) -> Outcome:
    outcome = Outcome()
    for file in sorted(files):
        for case in json.loads(file.read_text()):
            outcome.add(file, case)
    return outcome


def test_no_value_of_the_required_suite_is_accepted_wrongly_and_most_schemas_are_taken(suite: Path) -> None:
    outcome = outcome_of(suite.glob("*.json"))
    assert outcome.wrong_accepts == []
    assert (outcome.schemas, outcome.taken, outcome.checks) == (368, 256, 870)
    assert {file for file, _, _ in outcome.wrong_refusals} == WRONGLY_REFUSED.keys()
    assert len(outcome.wrong_refusals) == 23
    assert all(refusal.startswith("$") for refusal in outcome.refusals)


def test_no_value_of_the_optional_suite_is_accepted_wrongly(suite: Path) -> None:
    outcome = outcome_of((suite / "optional").rglob("*.json"))
    assert outcome.wrong_accepts == []
    assert outcome.taken >= 45
