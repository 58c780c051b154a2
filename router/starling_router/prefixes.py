"""Finds what backends have cached of a prompt: as their events say, or guessed from what they were sent."""

from collections.abc import Mapping

from starling_router.events import CachedBlocks
from starling_router.index import GuessedIndex, longest_prefixes
from starling_router.prompt import RoutedPrompt


class Prefixes:
    """Prefixes of prompts, by the numbers of backends."""

    def __init__(self, cached: CachedBlocks, guessed: GuessedIndex) -> None:
        self._cached, self._guessed = cached, guessed

    def cached_tokens(self, prompt: RoutedPrompt) -> Mapping[int, int]:
        """Returns how many of the prompt's first tokens each backend has, by number; those that have none are left out."""
        if not prompt.exact:
            found = longest_prefixes((self._guessed.index,), prompt.blocks)
            return {backend: count * prompt.block_tokens for backend, count in found}
        best: dict[int, int] = {}
        for core, count in longest_prefixes(self._cached.indexes, prompt.blocks, self._cached.snapshots):
            backend = self._cached.backends[core]
            best[backend] = max(best.get(backend, 0), count * prompt.block_tokens)
        return best

    def begun_tokens(self, prompt: RoutedPrompt) -> Mapping[int, int]:
        """Returns how many of its first tokens each backend was sent before, where that says more than what is cached.

        A model with a state leaves a snapshot where a prompt parts from an earlier one, so the second one finds none there yet.
        """
        if not (prompt.exact and self._cached.snapshots.needed):
            return {}
        return {backend: count * prompt.block_tokens for backend, count in longest_prefixes((self._guessed.index,), prompt.blocks)}

    def sent(self, backend: int, prompt: RoutedPrompt) -> None:
        """Notes that a backend has got a prompt. What comes of its blocks it tells itself where it is followed."""
        if not prompt.exact or self._cached.snapshots.needed:
            self._guessed.sent(backend, prompt.blocks)
