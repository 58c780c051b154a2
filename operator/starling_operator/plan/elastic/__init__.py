"""Sizes of elastic groups: which one is wanted, and the next step of a live group towards it. Pure, as all of `plan`."""
