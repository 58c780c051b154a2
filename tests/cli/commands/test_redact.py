"""Nothing secret goes into a support bundle."""

import json

import pytest
from starling_cli.bundling.redact import LEFT_OUT, redacted

HIDDEN = "s3cr3t"


@pytest.mark.parametrize(
    "value",
    [
        {"kind": "Secret", "data": {"a": HIDDEN}},
        {"kind": "Secret", "stringData": {"a": HIDDEN}},
        {"items": [{"kind": "Secret", "data": {"a": HIDDEN}}]},
        {"kind": "Secret", "metadata": {"annotations": {"kubectl.kubernetes.io/last-applied-configuration": HIDDEN}}},
        {"spec": {"template": {"spec": {"containers": [{"env": [{"name": "HF_TOKEN", "value": HIDDEN}]}]}}}},
        {"env": [{"name": "DB_PASSWORD", "value": HIDDEN}, {"name": "AWS_SECRET_ACCESS_KEY", "value": HIDDEN}]},
        {"env": [{"name": "openai_api_key", "value": HIDDEN}, {"name": "OPENAI_APIKEY", "value": HIDDEN}]},
        {"metadata": {"managedFields": [HIDDEN]}},
    ],
)
def test_what_is_left_out(value):
    assert HIDDEN not in json.dumps(redacted(value))


def test_the_keys_of_a_secret_stay():
    assert redacted({"kind": "Secret", "data": {"token": HIDDEN}})["data"] == {"token": LEFT_OUT}


def test_everything_else_stays():
    value = {"kind": "Pod", "spec": {"containers": [{"env": [{"name": "COLOUR", "value": "red"}]}], "n": 1, "b": None}}
    assert redacted(value) == value
