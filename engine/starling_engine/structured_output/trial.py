"""Tries a grammar with a vocabulary, as an engine core will use it."""

import time

import llguidance

from starling_engine.structured_output.matcher import LIMITS

MASK_SECONDS = 0.1
"""Processor time of the first mask. In a core, all requests of a step wait for it; usual ones take less than a hundredth."""


class UnusableGrammar(ValueError):
    """A grammar that the library cannot read, finds too complex, or under which no output is possible; the message says which."""


def try_grammar(grammar: str, vocabulary: llguidance.LLTokenizer) -> None:
    """Builds a grammar and asks what an output may begin with.

    A hostile one takes seconds, gigabytes, or the whole process: call it where these are limited. Raises `UnusableGrammar`.
    """
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
    # The library fails where nothing is possible. Its masks then allow to end, so it has to be asked.
    started = time.process_time()
    matcher.compute_bitmask()
    seconds = time.process_time() - started
    if matcher.is_error():
        raise UnusableGrammar(_reason(matcher.get_error()))
    if warnings := matcher.get_grammar_warnings():
        raise UnusableGrammar(warnings[0].splitlines()[0])
    if seconds > MASK_SECONDS:
        raise UnusableGrammar(f"the first step takes more than {MASK_SECONDS:g} s of processor time")


def _reason(error: str) -> str:
    """The line of the library's error that says why, without the grammar that it quotes."""
    if error.startswith("NoExtension"):
        return "no output is possible"
    lines = error.strip().splitlines()
    return next((line for line in reversed(lines) if line.startswith("error: ")), lines[0])[:300]
