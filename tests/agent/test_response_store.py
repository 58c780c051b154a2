"""The store of responses: its bound, and whose they are."""

import pytest
from starling_agent.http.errors import ApiError
from starling_agent.openai.responses.store import ResponseStore, StoredResponse


def response(size: int, owner: str | None = None) -> StoredResponse:
    return StoredResponse(owner, b"x" * size, b"", b"")


def test_the_least_recently_used_gives_way():
    store = ResponseStore(100)
    store.put("a", response(40))
    store.put("b", response(40))
    store.get("a", None)
    store.put("c", response(40))
    assert store.bytes == 80
    store.get("a", None)
    with pytest.raises(ApiError) as error:
        store.get("b", None)
    assert error.value.status == 404
    store.put("d", response(101))
    assert store.bytes == 0
    assert (store.takes(25), store.takes(26)) == (True, False)


def test_a_response_is_its_owners():
    store = ResponseStore(100)
    store.put("a", response(10, "one"))
    for owner in (None, "two"):
        with pytest.raises(ApiError):
            store.get("a", owner)
        with pytest.raises(ApiError):
            store.delete("a", owner)
    store.delete("a", "one")
    assert store.bytes == 0
