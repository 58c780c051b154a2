"""Good manifests pass both judges, come back with defaults, and are parsed to the same."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from starling_crds.parse import parse, parse_spec
from starling_crds.v1alpha1.router import RouterPolicySpec
from starling_crds.v1alpha1.spec import InferenceServiceSpec

from tests.crds.api import Api, Refusal
from tests.crds.manifests import service

EXAMPLES = Path(__file__).parents[2] / "examples"
TIER = "kvCache.tiers.filesystem"

GOOD: dict[str, dict[str, Any]] = {
    "smallest": service(),
    "longest name": service(name="a" * 40),
    "shortest name": service(name="a"),
    "revision": service({"model.source": "hf://org/name.v1-2@refs/pr/1"}),
    "a GGUF file of the hub": service({"model.source": "hf://org/name-GGUF:q4/name-Q4_K_M-00001-of-00002.gguf@main"}),
    "a GGUF file in a claim": service({"model.source": "pvc://weights/models/name.gguf"}),
    "weights quantized as they are loaded": service({"engine.extraArgs": {"quantization": "int4"}}),
    "claim": service({"model.source": "pvc://weights/models/a b"}),
    "file": service({"model.source": "file:///opt/models/x..y"}),
    "model": service(
        {
            "model.servedNames": ["chat", "org/chat:7b"],
            "model.dtype": "bfloat16",
            "model.maxLength": 8192,
            "model.classifierFromToken": "no,yes",
            "model.tokenSecret": {"name": "hub", "key": "token"},
            "model.pullSecrets": ["registry"],
        }
    ),
    "cache in a claim": service({"model.cache.claim": "weights"}),
    "cache on the node": service({"model.cache.hostPath": "/var/cache/starling"}),
    "cache with a limit": service({"model.cache.sizeLimit": "1.5Ti"}),
    "no replicas": service({"replicas": 0, "suspend": True}),
    "tensor": service({"parallelism.tensor": 4, "accelerators": {"type": "nvidia.com/gpu", "perNode": 4}}),
    "tensor over nodes": service({"parallelism.tensor": 16, "accelerators.perNode": 8}),
    "a node's ranks are no multiple of tensor": service({"parallelism": {"tensor": 2, "pipeline": 3}, "accelerators.perNode": 3}),
    "data over nodes": service({"parallelism": {"tensor": 2, "pipeline": 2, "data": 4}, "accelerators.perNode": 8}),
    "expert": service({"parallelism": {"tensor": 2, "expert": 8}, "accelerators.perNode": 4}),
    "as many pods as are possible": service({"parallelism": {"tensor": 8, "data": 4096}, "accelerators.perNode": 8}),
    "elastic expert": service({"parallelism": {"expert": 4, "elastic": {"min": 1, "max": 8}}}),
    "elastic data": service({"parallelism": {"data": 1, "elastic": {"min": 1, "max": 1}}}),
    "engine": service(
        {
            "engine": {
                "kvMemory": "0.5Gi",
                "memoryFraction": 1,
                "blockSize": 32,
                "maxBatchedTokens": 256,
                "stepTargetMilliseconds": 100,
                "maxSequences": 256,
                "prefixCaching": False,
                "schedulingPolicy": "priority",
                "extraArgs": {"num_threads": 4, "async_scheduling": True, "load_format": "dummy", "seed": None},
            }
        }
    ),
    "tiers": service({"kvCache.tiers.cpu.bytes": "16Gi", TIER: {"bytes": "200G", "claim": "kv"}}),
    "a cache in 4 bits": service({"kvCache.dtype": "int4"}),
    "a cache in fp8": service({"kvCache.dtype": "fp8", "engine.prefixCaching": False}),
    "a folder on nodes": service({TIER: {"bytes": "64Mi", "path": "/var/lib/starling/kv"}}),
    "responses in a folder on nodes": service({"endpoint.responseStore": {"path": "/var/lib/starling/responses"}}),
    "routers": service({"router": {}}),
    "zero": service({"replicas": 0, "router": {}, "scaling": {"idleSeconds": 10}}),
    "routers on some nodes": service(
        {
            "router": {
                "nodeSelector": {"kubernetes.io/arch": "amd64"},
                "tolerations": [
                    {"operator": "Exists"},
                    {"key": "dedicated", "value": "ai"},
                    {"key": "spot", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30},
                ],
                "priorityClassName": "high",
            }
        }
    ),
    "routers of all kinds": service(
        {
            "router": {
                "replicas": 16,
                "policy": {"prefix": 0, "load": 0.5, "session": 1000},
                "hold": {"requests": 0, "bytes": "1Gi", "seconds": 0},
                "resources": {"requests": {"cpu": "500m"}, "limits": {"memory": "1Gi"}},
            }
        }
    ),
    "a pool": service(
        {
            "router": {},
            "endpoint.route": {
                "parentRefs": [{"name": "edge"}],
                "timeouts": {"request": "1h30m", "backendRequest": "90m"},
                "backend": "InferencePool",
                "failureMode": "FailOpen",
                "proxies": [
                    {"namespace": "edge"},
                    {"labels": {"app": "a", "example.org/App_1.x": ""}},
                    {"cidr": "10.0.0.0/24"},
                    {"cidr": "fd00::/64"},
                ],
            },
        }
    ),
    "a try without an end of its own": service(
        {"endpoint.route": {"parentRefs": [{"name": "edge"}], "timeouts": {"request": "0s", "backendRequest": "500ms"}}}
    ),
    "a canary": service(
        {
            "router": {},
            "rollout": {
                "pause": True,
                "canary": {
                    "steps": [
                        {"weight": 1, "seconds": 60, "maxErrorPercent": 0, "maxFirstTokenRatio": 2.5},
                        {"weight": 99},
                    ],
                    "stickyBy": "session",
                    "compare": "tokens",
                },
            },
        }
    ),
    "tenants": service(
        {
            "router": {
                "tenants": [
                    {"name": "chat", "priority": 1},
                    {"name": "batch-2", "priority": -1, "weight": 0.5, "tokensPerMinute": 200000, "concurrent": 64},
                ],
                "tenantKeysSecret": "starling-api-keys",
            }
        }
    ),
    "store": service({"kvCache.store": "mooncake://starling-mooncake.starling-system.svc:50051?segment=4Gi"}),
    "store by its address": service({"kvCache.store": "mooncake://[fd00::7]:50051"}),
    "endpoint": service(
        {
            "endpoint": {
                "port": 8443,
                "apiKeySecret": {"name": "keys", "key": "keys.txt"},
                "allowedHosts": ["chat.example.org", "*.example.org"],
                "prefixCacheSalt": "none",
                "toolCallParser": "qwen3_coder",
                "reasoningParser": "none",
                "wholeToolCalls": True,
                "responseStore": {"bytes": "10Gi", "seconds": 3600, "claim": "responses"},
                "limits": {"rate": "100/30s", "maxBodyBytes": "1Mi", "readSeconds": 5, "connectionSeconds": 0},
                "allowedOrigins": ["*", "https://example.org:8443"],
                "route": {
                    "parentRefs": [
                        {"name": "edge", "namespace": "infra", "sectionName": "https", "port": 443},
                        {"group": "", "kind": "Service", "name": "chat"},
                    ],
                    "hostnames": ["chat.example.org", "*.example.org"],
                },
                "tlsSecret": "chat-tls",
            }
        }
    ),
    "surge only": service({"rollout": {"maxSurge": 2}}),
    "unavailable only": service({"rollout": {"maxSurge": 0, "maxUnavailable": 1}}),
    "lifecycle": service({"drain": {"acceptSeconds": 0, "seconds": 0}, "recovery": {"restartBudget": 0, "windowSeconds": 60}}),
    "template": service(
        {
            "image": "registry.example:5000/starling-agent@sha256:0123",
            "template.metadata": {"labels": {"team": "a", "app.kubernetes.io/part-of": ""}, "annotations": {"x": "a b\nc"}},
            "template.spec": {
                "nodeSelector": {"disk": "ssd"},
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
                "hostNetwork": False,
                "restartPolicy": "Always",
                "containers": [
                    {"name": "agent", "env": [{"name": "A", "value": "b"}], "resources": {"limits": {"memory": "3Gi"}}},
                    {"name": "side", "image": "side:1", "command": ["sh"], "args": ["-c", "true"]},
                ],
            },
        }
    ),
    "nulls are absent fields": service()
    | {"spec": {"model": {"source": "file:///m", "dtype": None}, "engine": None, "image": None}},
}


@pytest.mark.parametrize("name", GOOD)
def test_both_accept_it_and_agree_on_what_it_means(api: Api, name: str):
    stored = api.check(GOOD[name])
    assert not isinstance(stored, Refusal), stored
    parsed = parse(GOOD[name])
    assert parsed.error is None
    assert parse_spec(stored["spec"]).spec == parsed.spec


def test_defaults_are_filled_in_by_the_api_server(api: Api):
    stored = api.check(service())
    assert not isinstance(stored, Refusal)
    smallest = InferenceServiceSpec.model_validate({"model": {"source": "hf://org/name"}})
    filled = smallest.model_dump(by_alias=True, exclude_none=True)
    assert stored["spec"] == _without_empty(filled)


def _without_empty(value: dict[str, Any]) -> dict[str, Any]:
    """Lists and maps that nobody wrote stay absent in the cluster."""
    pruned = {name: _without_empty(entry) if isinstance(entry, dict) else entry for name, entry in value.items()}
    return {name: entry for name, entry in pruned.items() if entry not in ({}, [])}


def test_nulls_of_the_overlay_reach_the_operator(api: Api):
    stored = api.check(service({"template.spec": {"priorityClassName": "x", "affinity": {"podAffinity": None}}}))
    assert not isinstance(stored, Refusal)
    assert stored["spec"]["template"]["spec"]["affinity"] == {"podAffinity": None}


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_examples_are_accepted(api: Api, file: Path):
    documents = [document for document in yaml.safe_load_all(file.read_text()) if document["kind"] == "InferenceService"]
    assert documents
    for document in documents:
        assert parse(document).error is None
        assert not isinstance(refusal := api.check(document), Refusal), refusal


@pytest.mark.parametrize("file", [EXAMPLES / "router.yaml", EXAMPLES.parent / "docs" / "routing.md"], ids=lambda file: file.name)
def test_weights_that_are_called_the_defaults_are_these(file: Path) -> None:
    (shown,) = re.findall(r"^ +policy: (\{.*?\})", file.read_text(), re.MULTILINE)
    assert yaml.safe_load(shown) == RouterPolicySpec().model_dump()


def test_a_service_that_no_operator_has_seen_says_so(api: Api) -> None:
    made = api.check(service())
    assert not isinstance(made, Refusal)
    (ready,) = made["status"]["conditions"]
    assert (ready["type"], ready["status"], ready["reason"]) == ("Ready", "Unknown", "Pending") and ready["message"]
