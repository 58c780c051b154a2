"""Python's garbage collector, kept out of the way of streams."""

import gc


def keep_for_good() -> None:
    """What start-up made stays; the collector need not walk it again, in the middle of streams.

    What an earlier call kept is looked at once more: an engine that was replaced is garbage by now.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
