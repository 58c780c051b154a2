"""Sizes of elastic groups: the wanted size, and the next step of each group towards it. Pure, as all of `plan`."""
