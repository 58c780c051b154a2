"""What the harness says when it cannot go on: one line with what was found and what to do."""


class HarnessError(Exception):
    """A message for the person at the terminal; never a bug of the harness."""
