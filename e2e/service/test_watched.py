"""The scenarios' own judgement, which must not take silence for success. No cluster is needed."""

import pytest

from e2e.service.watched import all_records, failures

ANSWERED = '{"error": null, "prompt": "a", "text": "b"}'


def test_traffic_that_died_or_asked_nothing_has_failed() -> None:
    assert failures(all_records("Succeeded", f"a warning\n{ANSWERED}\n")) == []
    for phase, log in (("Succeeded", ""), ("Succeeded", "a warning"), ("Failed", ANSWERED), ("Failed", "Traceback: no openai")):
        with pytest.raises(AssertionError, match=f"the traffic ended as {phase}"):
            all_records(phase, log)
