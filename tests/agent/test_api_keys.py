"""API keys and their sources."""

import pytest
from starling_agent.api_keys import KEY_VARIABLE, ApiKeys, api_keys, cache_salt_of
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
