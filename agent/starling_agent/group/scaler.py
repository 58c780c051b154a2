"""What the leader's admin endpoint asks of whoever changes the group's size."""

from typing import Protocol

from starling_agent.contract.scale import Operation, ScaleRequest


class ScaleRefusal(Exception):
    """Nothing has changed. `code` is one of those of `contract.scale`; the message is for people and says what is possible."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Scaler(Protocol):
    """Changes of size, one at a time. All return at once; what comes of an operation is asked for by its id."""

    def put(self, request: ScaleRequest) -> Operation:
        """Begins the operation, or returns what became of it where the id is known. Raises ScaleRefusal."""
        ...

    def get(self, operation: str) -> Operation:
        """Raises ScaleRefusal for an id that is not known."""
        ...

    def cancel(self, operation: str) -> Operation:
        """Undoes it, which may take a while; it is `cancelled` then. Raises ScaleRefusal from its commit on."""
        ...
