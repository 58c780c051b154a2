"""A running `starling serve`, as the agent's tests use it."""

from tests.agent.conftest import server

__all__ = ["server"]
