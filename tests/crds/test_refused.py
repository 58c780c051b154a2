"""Every bad manifest is refused by a real API server and, with the same field, without one."""

import pytest
from starling_crds.parse import parse

from tests.crds.api import Api, Refusal
from tests.crds.bad import ALL, Bad


def test_the_table_is_long():
    assert len(ALL) >= 100


@pytest.mark.parametrize("manifest", ALL, ids=str)
def test_the_api_server_names_the_field_and_what_is_possible(api: Api, manifest: Bad):
    refusal = api.check(manifest.body)
    assert isinstance(refusal, Refusal), "accepted"
    if manifest.unknown:
        assert manifest.says in refusal.message
    elif manifest.field == "metadata.name":
        assert "metadata.name" in refusal.message and manifest.says in refusal.message
    else:
        assert manifest.says in refusal.fields.get(manifest.field, ""), refusal


@pytest.mark.parametrize("manifest", ALL, ids=str)
def test_the_same_is_refused_without_an_api_server(manifest: Bad):
    parsed = parse(manifest.body)
    assert parsed.spec is None
    found = [problem.message for problem in parsed.problems if problem.path == manifest.field]
    assert any(manifest.locally in message for message in found), parsed.error
