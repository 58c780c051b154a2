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

    def sent(self, backend: int, prompt: RoutedPrompt) -> None:
        """Notes that a backend has got a prompt. Its events will say so themselves where it publishes them."""
        if not prompt.exact:
            self._guessed.sent(backend, prompt.blocks)
