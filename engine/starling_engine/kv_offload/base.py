"""The door of KV offload: what the scheduler and the engine core ask of the tiers below the device.

Chunks of the KV cache are kept there, to be found by later requests, restarts and other engines.

scheduler, core        OffloadManager, the only door (manager.TieredOffload; the class itself where there are no tiers)
                         |- promotions, pin_quota   secondary -> primary, for requests that wait
                         |- device                  primary -> device and back
                         |- write_back              primary -> secondary
                         |- policies                swap or recompute, look up or pass by, how much to write back
                         `- primary, jobs, stats    chunk slots, open orders, counters
                       --- orders ---------------------------------------------------------------------------------
each rank's worker     transfers.TransferThreads    carries orders out beside the steps
                         |- arena                   host memory, and copies between it and the device's pages
                         `- secondary               a folder of files, and a store over the network

The verbs are those of vLLM's OffloadingManager. Nothing here waits: orders are taken by the core, carried out beside the steps,
and their outcome comes back through `complete`. A request that waits for chunks has a closed gate (`request_state.Gate`).
"""

from collections.abc import Collection, Mapping, Sequence, Set

from starling_engine.delta import TierStats
from starling_engine.kv.events import EventLog
from starling_engine.kv_offload.orders import TierStatus, TransferDone, TransferOrder
from starling_engine.request_state import RequestState


class OffloadManager:
    """The tiers of one scheduler, whose thread makes all calls. This class itself is that of an engine without any tier."""

    # ---- requests ----

    def on_new_request(self, request: RequestState) -> None:
        """Looks its prefix up in the secondary tiers; the request is parked until they have answered."""

    def on_request_preempted(self, request: RequestState) -> None:
        """The request waits again, without blocks; it looks up when its turn comes."""

    def on_request_finished(self, request: RequestState) -> None:
        """The request has started or ended: nothing is pinned or looked up for it any more."""

    def must_wait(self, request: RequestState) -> bool:  # noqa: ARG002
        """Returns whether a request that could start has to wait: for a lookup, or for room in the primary tier."""
        return False

    # ---- primary tier to device ----

    def lookup(self, request: RequestState, hit: int) -> int | None:  # noqa: ARG002
        """Tokens of the prefix on the device (`hit` blocks) and after them in the primary tier; 0 where that is no gain.

        None: others load the same chunks now, and the request is parked until they have come.
        """
        return 0

    def count_lookup(self, request: RequestState, hit: int, length: int) -> int:  # noqa: ARG002
        """Counts the lookup of a request that starts with `length` tokens, of which the device had `hit` blocks.

        Returns the tokens that were looked for outside the device.
        """
        return 0

    def prepare_load(self, request: RequestState, hit: int, length: int, after: int) -> None:  # noqa: ARG002
        """Orders chunks into the request's blocks, from the `hit`-th block to `length` tokens, and parks it until they come.

        The blocks are written once step `after` has run.
        """
        raise AssertionError("nothing was found outside the device")

    # ---- device to primary tier ----

    def on_blocks_cached(self, request: RequestState) -> None:
        """The request has more full blocks of confirmed tokens: their chunks may be stored."""

    def on_snapshots_cached(self, request: RequestState, lengths: Sequence[int]) -> None:
        """Snapshots of the request's state at these lengths have names: they may be stored."""

    def on_request_stopped(self, request: RequestState) -> None:
        """The request is about to give its blocks back: the last snapshot in its output may be stored, as none takes its place."""

    def prepare_store(self, running: int, *, idle: bool) -> None:
        """Orders stores and write-backs before a step with `running` requests, and lets requests go whose lookups are late.

        `idle`: there is no request at all.
        """

    def prepare_swap(self, request: RequestState) -> bool:  # noqa: ARG002
        """The request is about to be preempted: stores its chunks where that is cheaper than computing them again.

        Returns whether they are stored.
        """
        return False

    def invalidate(self, hashes: Sequence[bytes]) -> None:
        """Chunks that end in one of these block hashes may hold wrong values. The secondary tiers are not asked to drop them."""

    # ---- orders and their outcome ----

    def on_step_finished(self, step: int, tokens: int, seconds: float) -> None:
        """The results of a step are known, which computed so many tokens in `seconds`."""

    def take_orders(self) -> list[TransferOrder]:
        """Returns the orders that have not been taken yet."""
        return []

    def complete(self, done: TransferDone) -> list[RequestState]:
        """An order was carried out, or failed. Returns running requests that cannot have the chunks they were promised."""
        raise AssertionError(f"job {done.job} was never ordered")

    def reset(self) -> None:
        """Forgets all that the primary tier holds."""

    def publish(self, log: EventLog | None) -> Collection[tuple[int, bytes]]:  # noqa: ARG002
        """Reports from now on what comes to the primary tier and leaves it; with None nothing any more.

        Returns the blocks that are there, by KV group and hash: none where nothing is reported.
        """
        return ()

    # ---- reports ----

    @property
    def has_pending_work(self) -> bool:
        """True if an outcome is to come, or chunks are to be stored that a crash would lose."""
        return False

    @property
    def uses_device(self) -> bool:
        """True if blocks of the device are read or written, or are to be."""
        return False

    @property
    def stats(self) -> Mapping[str, TierStats]:
        """Counters by the tier's name."""
        return {}

    def update_status(self, status: TierStatus) -> None:
        """The secondary tiers' state, as the ranks report it."""

    def pinned_blocks(self) -> list[list[int]]:
        """Returns the device's blocks that each open order reads or writes."""
        return []

    def check_integrity(self, waiting: Set[str]) -> None:
        """Asserts that slots, orders and pins agree, and that pins are of `waiting` requests."""
