"""Failures of a node, and whether another try may help."""


class NodeFailure(Exception):
    """The message is for people: it names what is wrong, and the field at fault.

    `fatal`: no restart can help, the configuration or the model must change.
    """

    def __init__(self, message: str, *, fatal: bool) -> None:
        super().__init__(message)
        self.fatal = fatal


def fatal(message: str) -> NodeFailure:
    return NodeFailure(message, fatal=True)


def transient(message: str) -> NodeFailure:
    """Makes a failure that another try may not meet."""
    return NodeFailure(message, fatal=False)


class Unreadable(Exception):
    """The agent cannot even report what is wrong; the process ends with UNREADABLE_EXIT_CODE."""


UNREADABLE_EXIT_CODE = 2
FAILED_EXIT_CODE = 1
