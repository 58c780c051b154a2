"""Whose pages may put an engine to sleep."""

import pytest
from starling_agent.http.foreign import is_foreign

HOST = "localhost:8000"
APP = "https://app.example"


@pytest.mark.parametrize(
    ("headers", "allowed", "foreign"),
    [
        ({}, [], False),
        ({"sec-fetch-site": "none"}, [], False),
        ({"sec-fetch-site": "same-origin", "origin": f"http://{HOST}"}, [], False),
        ({"origin": f"https://{HOST}"}, [], False),
        ({"sec-fetch-site": "cross-site"}, [APP], True),
        ({"sec-fetch-site": "cross-site", "origin": "https://evil.example"}, [APP], True),
        ({"sec-fetch-site": "cross-site", "origin": APP}, [APP], False),
        ({"sec-fetch-site": "cross-site", "origin": APP}, ["*"], False),
        ({"sec-fetch-site": "same-site", "origin": "http://localhost:3000"}, [], True),
        ({"origin": "null"}, [], True),
        ({"origin": "null", "host": ""}, [], True),
        ({"origin": f"http://evil.{HOST}"}, [], True),
    ],
)
def test_whose_page_it_is(headers, allowed, foreign):
    assert is_foreign({"host": HOST} | headers, allowed) is foreign
