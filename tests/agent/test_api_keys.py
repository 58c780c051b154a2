"""API keys and their sources."""

import pytest
from starling_agent.api_keys import KEY_VARIABLE, ApiKeys, api_keys, cache_salt_of, tenant_owner
from starling_agent.file_token import FileToken
from starling_agent.http.auth import KeyCheck
from starling_agent.openai.endpoint import Caller
from starling_engine.errors import ConfigError


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def test_without_sources_there_are_no_keys():
    assert api_keys((), None) == ()


def test_keys_of_all_sources_are_accepted(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("# comment\n  c  \n\nd\na\n")
    monkeypatch.setenv(KEY_VARIABLE, "b, c ,")
    assert api_keys(["a"], file) == ("a", "b", "c", "d")


def test_an_empty_key_is_refused():
    with pytest.raises(ConfigError, match="empty"):
        api_keys([""], None)


def test_a_file_without_keys_is_refused(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# nothing yet\n")
    with pytest.raises(ConfigError, match="no key"):
        api_keys((), file)
    with pytest.raises(ConfigError, match="cannot be read"):
        api_keys((), tmp_path / "absent")


def test_a_file_is_read_again_when_it_changes_and_fails_closed(tmp_path):
    file = tmp_path / "keys"
    file.write_text("leaked\nkept\n")
    keys = ApiKeys(["given"], file)
    for content, known in (
        ("kept\n", {"given", "kept"}),
        ("# none\n", {"given"}),
        ("new\n", {"given", "new"}),
        (None, {"given"}),
        ("leaked\n", {"given", "leaked"}),
    ):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_text(content)
        assert {key for key in ("given", "leaked", "kept", "new", "") if keys.knows(key.encode())} == known
        assert keys, "the endpoint always needs a key"
    assert not ApiKeys()


@pytest.mark.parametrize(("salted", "salt"), [(True, "db9630a5a7dfa5e481a6a2879dc1506f"), (False, None)])
async def test_a_key_has_the_same_salt_on_every_server(salted, salt):
    async def app(*_: object) -> None:
        pass

    scope = {"type": "http", "path": "/v1/models", "headers": [(b"authorization", b"Bearer a key")], "state": {}}
    await KeyCheck(app, keys=ApiKeys(["a key"]), salted=salted)(scope, None, None)
    assert scope["state"]["key_salt"] == salt, "with another one, cached prefixes in folders and stores would not be found"


def test_different_keys_and_salts_never_give_one_cache_salt():
    keys = [None, cache_salt_of(b"a"), cache_salt_of(b"b")]
    salts = [Caller("id", key).cache_salt(given) for key in keys for given in (None, "s", "s:", ":s")]
    assert len(set(salts)) == len(salts)
    assert Caller("id", None).cache_salt(None) is None


SHADOW = {"x-starling-shadow": "yes", "x-api-key": "a key"}
LONE = {"x-starling-lone": "yes"}


@pytest.mark.parametrize(
    ("headers", "path", "seen"),
    [
        ({"x-starling-router": "token", "x-starling-tenant": "chat", "x-starling-priority": "3"}, "/v1/models", ("tenant", 3)),
        ({"x-starling-router": "token", "x-starling-tenant": "chat", **LONE}, "/v1/models", ("tenant", 0)),
        ({"x-starling-router": "wrong", "x-api-key": "a key", **LONE}, "/v1/models", ("key", None)),
        ({"x-starling-router": "wrong", "x-starling-tenant": "chat"}, "/v1/models", None),
        ({"x-starling-tenant": "chat"}, "/v1/models", None),
        ({"x-starling-router": "token"}, "/v1/models", None),
        ({"x-starling-router": "token"}, "/backend", (None, None)),
        ({"x-starling-router": "token", "authorization": "Bearer a key"}, "/v1/models", ("key", None)),
        ({"x-starling-router": "token", "x-starling-priority": "-9", **SHADOW}, "/v1/models", ("key", -9)),
        ({"x-starling-router": "wrong", "x-starling-priority": "9", **SHADOW}, "/v1/models", ("key", None)),
    ],
)
async def test_a_tenant_is_believed_from_routers_alone(tmp_path, headers, path, seen):
    async def app(scope: dict[str, object], *_: object) -> None:
        passed.append(scope)

    async def send(message: dict[str, object]) -> None:
        assert message.get("status", 401) == 401

    passed: list[dict[str, object]] = []
    (tmp_path / "token").write_text("token")
    check = KeyCheck(app, keys=ApiKeys(["a key"]), salted=True, router_token=FileToken(tmp_path / "token"))
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    state: dict[str, object] = {"request_id": "r"}
    await check({"type": "http", "path": path, "headers": raw, "state": state}, None, send)
    assert bool(passed) == (seen is not None)
    if seen is not None:
        owners = {"tenant": cache_salt_of(tenant_owner(b"chat")), "key": cache_salt_of(b"a key"), None: None}
        assert (state.get("key_salt"), state.get("priority")) == (owners[seen[0]], seen[1])
    assert state.get("is_lone", False) == ("x-starling-lone" in headers and headers["x-starling-router"] == "token")
    assert state.get("is_shadow", False) == ("x-starling-shadow" in headers and headers["x-starling-router"] == "token")
