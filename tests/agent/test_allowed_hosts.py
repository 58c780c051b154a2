"""Host names that an endpoint answers for."""

import pytest
from starling_agent.http.allowed_hosts import is_allowed
from starling_agent.settings import ServerSettings
from starling_engine.errors import ConfigError

ALLOWED = ("chat.example.org", "*.team.example")


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("chat.example.org", True),
        ("Chat.Example.ORG.", True),
        ("chat.example.org:8443", True),
        ("a.team.example", True),
        ("a.b.team.example:80", True),
        ("localhost:8000", True),
        ("10.1.2.3:8000", True),
        ("[fd00::7]:8000", True),
        ("[::1]", True),
        ("example.org", False),
        ("team.example", False),
        ("evilteam.example", False),
        ("chat.example.org.evil.example", False),
        ("10.1.2.3.evil.example", False),
        ("localhost.evil.example", False),
        ("", False),
    ],
)
def test_an_endpoint_answers_for_listed_hosts_addresses_and_localhost(host, allowed):
    assert is_allowed(host, ALLOWED) is allowed


@pytest.mark.parametrize("name", ["*", "https://chat.example.org", "chat.example.org:80", "", "a..b"])
def test_a_setting_that_is_no_host_name_is_refused(name):
    with pytest.raises(ConfigError, match="allowed_hosts: must be names"):
        ServerSettings(allowed_hosts=(name,))
