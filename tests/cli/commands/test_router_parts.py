"""Flags of `starling router` become parts of it: where servers are, and its words for that."""

from pathlib import Path
from typing import Any

import pytest
from starling_agent.api_keys import ApiKeys
from starling_cli.commands.router_parts import sources_of, tenancy_of
from starling_engine.errors import ConfigError


@pytest.mark.parametrize(
    ("urls", "service", "words"),
    [
        (["http://a:1/v1"], None, "1 server"),
        (["http://a:1", "http://b:1"], "agents.default", "2 servers and agents.default"),
    ],
)
def test_where_servers_are_in_words(urls: list[str], service: str | None, words: str) -> None:
    found, said = sources_of(urls, None, service, 8000, has_epp=False)
    assert said == words and len(found.given) == len(urls) and found.may_change == (service is not None)


def test_no_servers_and_a_gateways_from_a_file_are_refused(tmp_path: Path) -> None:
    for file, field in ((None, "backends"), (tmp_path / "urls", "backends_file")):
        with pytest.raises(ConfigError) as refused:
            sources_of([], file, None, 8000, has_epp=True)
        assert refused.value.field == field


@pytest.mark.parametrize("given", [{"routers": 2}, {"saturation_steps": 0.0}, {"tenant_keys_dir": Path("keys")}])
def test_what_is_for_tenants_needs_their_file(given: dict[str, Any]) -> None:
    without: dict[str, Any] = {"tenant_keys_dir": None, "routers": None, "saturation_steps": None}
    with pytest.raises(ConfigError, match="needs --tenants-file") as refused:
        tenancy_of(None, ApiKeys(()), None, **without | given)
    assert refused.value.field == next(iter(given))
