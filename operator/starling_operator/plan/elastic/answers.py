"""What a leader answers to a call that it refuses."""

import json

from starling_operator.plan.observed import LeaderAnswer


def refusal(status: int, text: str) -> LeaderAnswer:
    """From OpenAI's error body; an answer of another form counts as one of an unknown code."""
    try:
        error = json.loads(text)["error"]
        return LeaderAnswer(str(error.get("code") or f"http_{status}"), str(error["message"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return LeaderAnswer(f"http_{status}", f"its leader answers {status}: {text.strip()[:200]}")
