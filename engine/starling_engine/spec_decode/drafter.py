"""Drafts of the tokens that a request will sample next (speculative decoding), as the scheduler sees them."""

from collections.abc import Sequence

from starling_engine.request_state import RequestState


class Drafter:
    """Proposes no drafts: the null object, and the interface of those that do.

    A draft is only ever a guess. Whatever is proposed, a request samples the tokens that it would sample without.
    """

    @property
    def active(self) -> bool:
        """True if it may propose any now."""
        return False

    def on_added(self, request: RequestState) -> None:
        """Takes a new request."""

    def waits(self, request: RequestState) -> bool:  # noqa: ARG002
        """Returns whether drafts follow tokens that are known: such a request has one step in flight at a time."""
        return False

    def begin_step(self, rows: int) -> None:
        """Begins to plan a step of about `rows` requests."""

    def propose(self, request: RequestState, most: int) -> Sequence[int]:  # noqa: ARG002
        """Returns at most `most` tokens that may follow the request's last one, the first of those that its next step samples.

        All of them may be OWN where that is possible: then the device guesses them.
        """
        return ()

    def on_step(self, tokens: int, seconds: float) -> None:
        """Takes the time of a step of decodes alone, with `tokens` tokens, drafts included."""

    def on_sampled(self, request: RequestState, num_drafts: int, sampled: Sequence[int]) -> int:  # noqa: ARG002
        """Takes what a row with `num_drafts` drafts sampled. The request has these tokens already. OWN drafts that are none
        count 0.

        Returns how many of the drafts were guesses: those that a grammar forces are none.
        """
        return num_drafts

    def on_finished(self, request: RequestState) -> None:
        """Takes the end of a request, with all its tokens."""
