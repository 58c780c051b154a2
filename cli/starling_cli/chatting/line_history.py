"""Arrow keys and earlier questions at the prompt."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MOST_LINES = 1000


def history_file() -> Path:
    """Returns the file of earlier lines, in the user's state folder."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "starling" / "history"


@contextmanager
def line_history(file: Path) -> Iterator[Callable[[str], None]]:
    """Yields a function that remembers a line, and writes the file at the end, for its owner's eyes alone. Raises OSError.

    Results of tools and answers to other prompts are not remembered.
    """
    import readline

    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(file, os.O_CREAT | os.O_RDONLY, 0o600))
    file.chmod(0o600)
    readline.read_history_file(file)
    readline.set_auto_history(False)
    readline.set_history_length(MOST_LINES)
    try:
        yield readline.add_history
    finally:
        readline.write_history_file(file)
