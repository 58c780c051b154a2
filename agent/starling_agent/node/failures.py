"""Why a node cannot serve, and whether trying again may help."""


class NodeFailure(Exception):
    """The message is for people: what is wrong, with the field where one is at fault.

    `fatal` says that no restart can help: the configuration or the model must change.
    """

    def __init__(self, message: str, *, fatal: bool) -> None:
        super().__init__(message)
        self.fatal = fatal


def fatal(message: str) -> NodeFailure:
    return NodeFailure(message, fatal=True)


def passing(message: str) -> NodeFailure:
    """A failure that another try may not meet."""
    return NodeFailure(message, fatal=False)


class Unreadable(Exception):
    """Without this nobody could even be told what is wrong; the process ends with UNREADABLE_EXIT_CODE."""


UNREADABLE_EXIT_CODE = 2
FAILED_EXIT_CODE = 1
