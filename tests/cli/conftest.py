"""Running servers, as the agent's tests use them."""

from tests.agent.conftest import server, tools_server

__all__ = ["server", "tools_server"]
