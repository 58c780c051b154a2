"""Web pages that may put an engine to sleep."""

import pytest
from starling_agent.http.allowed_origins import is_cross_origin

HOST = "localhost:8000"
APP = "https://app.example"


@pytest.mark.parametrize(
    ("headers", "allowed", "cross_origin"),
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
def test_a_request_of_another_origins_page_is_recognised(headers, allowed, cross_origin):
    assert is_cross_origin({"host": HOST} | headers, allowed) is cross_origin
