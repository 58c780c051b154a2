"""Host memory through which files and a store pass, where there is no CPU tier. Pure, and light: the operator reckons with it."""

MOST_PASSAGE = 1 << 30
"""Bytes of a rank."""


def most_passage(kv_bytes: int | None) -> int:
    """Bytes of a rank at most, whose cache on the device has `kv_bytes`: no request brings more. None where that is not known."""
    return MOST_PASSAGE if kv_bytes is None else min(MOST_PASSAGE, kv_bytes)
