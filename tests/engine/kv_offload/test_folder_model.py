"""Random writes, reads, evictions, restarts and damage, against what a dictionary says."""

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from starling_engine.kv_offload.secondary.base import ObjectMissing, TierError
from starling_engine.kv_offload.secondary.folder.object_file import supports_direct
from starling_engine.kv_offload.secondary.folder.tier import FolderTier
from starling_engine.kv_offload.secondary.folder.usage import HIGH, LOW

from tests.engine.kv_offload.objects import FILE, content, file_of, key, quiet_tier, read, run_janitor, write

LIMIT = 6
numbers = st.integers(0, 9)
users = st.integers(0, 1)


class TwoUsers(RuleBasedStateMachine):
    """Two engines with one folder. `there` is what has been written and neither damaged nor evicted; numbers of objects."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name)
        self.direct = bool(supports_direct(self.root / "probe"))
        self.tiers = [self.opened(), self.opened()]
        self.there: set[int] = set()

    def opened(self) -> FolderTier:
        return quiet_tier(self.root, LIMIT * FILE, direct=self.direct)

    def teardown(self) -> None:
        self.folder.cleanup()

    @rule(user=users, number=numbers)
    def writes(self, user: int, number: int) -> None:
        try:
            write(self.tiers[user], number)
            self.there.add(number)
        except TierError:
            # The other one may have written beyond it, before it knew of this one's files.
            if self.tiers[user]._usage.count is not None:
                assert self.tiers[user].counters.bytes > (LIMIT - 1) * FILE, "it is full, as far as this one knows"

    @rule(user=users, number=numbers, at=st.sampled_from([0, 8]))
    def reads(self, user: int, number: int, at: int) -> None:
        try:
            assert read(self.tiers[user], number, at=at) == content(number)
            assert number in self.there
        except ObjectMissing:
            assert number not in self.there

    @rule(user=users)
    def finds(self, user: int) -> None:
        found = self.tiers[user].lookup([key(number) for number in range(10)])
        assert {number for number in range(10) if found[number]} == self.present() >= self.there

    @rule(user=users)
    def looks(self, user: int) -> None:
        evicted = self.tiers[user].counters.evicted
        before = self.present()
        self.tiers[user].janitor.tick()
        gone = before - self.present()
        assert self.tiers[user].counters.evicted - evicted == len(gone)
        self.there -= gone

    @rule(user=users, closes=st.booleans())
    def restarts(self, user: int, closes: bool) -> None:
        if closes:
            self.tiers[user].janitor.leave()
        self.tiers[user] = self.opened()

    @rule(number=numbers, at=st.integers(0, FILE - 1))
    def is_damaged(self, number: int, at: int) -> None:
        path = file_of(self.root, number)
        if path.exists():
            data = path.read_bytes()
            path.write_bytes(data[:at])
            self.there.discard(number)

    @rule(number=numbers)
    def is_removed(self, number: int) -> None:
        file_of(self.root, number).unlink(missing_ok=True)
        self.there.discard(number)

    @rule()
    def is_swept(self) -> None:
        """The holder of the lease evicts what is too much and no more."""
        for tier in self.tiers:
            tier.janitor.leave()
        (self.root / "lease").unlink(missing_ok=True)  # of one that was not closed
        before = self.present()
        too_much = sum(file_of(self.root, number).stat().st_size for number in before) > HIGH * LIMIT * FILE
        last = self.tiers[0] = self.opened()
        self.tiers[1] = self.opened()
        run_janitor(last)
        last.janitor.tick()
        held = self.present()
        left = sum(file_of(self.root, number).stat().st_size for number in held)
        assert held < before and left <= LOW * LIMIT * FILE < left + FILE if too_much else held == before
        self.there &= held

    @invariant()
    def leaves_nothing_behind(self) -> None:
        assert not list((self.root / "tmp").iterdir())
        assert all(not tier.counters.errors for tier in self.tiers)

    def present(self) -> set[int]:
        return {number for number in range(10) if file_of(self.root, number).exists()}


TestTwoUsers = TwoUsers.TestCase
TestTwoUsers.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
