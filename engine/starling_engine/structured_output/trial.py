"""Tries a grammar with a vocabulary, as an engine core will use it."""

import time

import llguidance

from starling_engine.structured_output.matcher import LIMITS

STEP_SECONDS = 0.03
"""Processor time of a step: what is forced, and the mask behind it. In a core all requests wait for it; usual ones take 0.1 ms."""
STEPS = 3
"""Steps that are tried. What becomes slow later meets `matcher.BUDGET_SECONDS`."""


class UnusableGrammar(ValueError):
    """A grammar that the library cannot read, finds too complex, or under which no output is possible; the message says which."""


def try_grammar(grammar: str, vocabulary: llguidance.LLTokenizer) -> None:
    """Builds a grammar and asks how an output has to begin, and what may come behind that.

    A hostile one takes seconds, gigabytes, or the whole process: call it where these are limited. Raises `UnusableGrammar`.
    """
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
    mask = _step(matcher)
    # The library fails where nothing is possible. Its masks then allow to end, so it has to be asked.
    if matcher.is_error():
        raise UnusableGrammar(_reason(matcher.get_error()))
    if warnings := matcher.get_grammar_warnings():
        raise UnusableGrammar(warnings[0].splitlines()[0])
    ends = sum(1 << token for token in vocabulary.eos_tokens)
    for _ in range(STEPS - 1):
        goes_on = int.from_bytes(mask, "little") & ~ends
        if not goes_on:
            return
        matcher.consume_token((goes_on & -goes_on).bit_length() - 1)
        mask = _step(matcher)


def _step(matcher: llguidance.LLMatcher) -> bytes:
    """Takes what is forced, and returns the mask behind it: none where the output has ended, or has failed."""
    started = time.process_time()
    matcher.consume_tokens(matcher.compute_ff_tokens())
    mask = b"" if matcher.is_stopped() else matcher.compute_bitmask()
    if time.process_time() - started > STEP_SECONDS:
        raise UnusableGrammar(f"a step takes more than {STEP_SECONDS:g} s of processor time")
    return mask


def _reason(error: str) -> str:
    """The line of the library's error that says why, without the grammar that it quotes."""
    if error.startswith("NoExtension"):
        return "no output is possible"
    if "forced bytes" in error.partition("\n")[0]:
        return "a text that has to come cannot be spelled with the tokenizer's tokens"
    lines = error.strip().splitlines()
    return next((line for line in reversed(lines) if line.startswith("error: ")), lines[0])[:300]
