"""agent.json and the pod template of a spec."""

import json
from dataclasses import replace
from typing import Any

import pytest
from starling_agent.contract.config import AgentConfig
from starling_operator.plan.admin_token import secret_name, with_token
from starling_operator.plan.config import agent_config
from starling_operator.plan.podtemplate import pod_template
from starling_operator.plan.resources import MIB, shm_bytes

from tests.operator.plan.building import SETTINGS, TOKEN, make_service, make_spec


def config_of(changes: dict[str, Any] | None = None) -> AgentConfig:
    return agent_config(make_service(), make_spec(changes), SETTINGS, "aaaaaaa")


def pod_of(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    template = pod_template(make_service(), make_spec(changes), SETTINGS, "aaaaaaa")
    pod: dict[str, Any] = with_token(make_service(), template, TOKEN)["spec"]
    return pod


def agent_of(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    container: dict[str, Any] = pod_of(changes)["containers"][0]
    return container


def mounts_of(changes: dict[str, Any]) -> dict[str, Any]:
    """{volume: (its source, where it is mounted, whether read-only)}."""
    pod = pod_of(changes)
    mounted = {mount["name"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    return {
        volume["name"]: (
            {key: value for key, value in volume.items() if key != "name"},
            mounted[volume["name"]]["mountPath"],
            mounted[volume["name"]].get("readOnly", False),
        )
        for volume in pod["volumes"]
    }


@pytest.mark.parametrize(
    ("changes", "argument", "value"),
    [
        ({}, "device", "cpu"),
        ({}, "dtype", "auto"),
        ({}, "max_model_len", None),
        ({}, "kv_cache_memory_bytes", None),
        ({}, "gpu_memory_utilization", None),
        ({"model": {"dtype": "bfloat16"}}, "dtype", "bfloat16"),
        ({"model": {"maxLength": 4096}}, "max_model_len", 4096),
        ({"model": {"classifierFromToken": "no,yes"}}, "classifier_from_token", "no,yes"),
        ({"engine": {"kvMemory": "4Gi"}}, "kv_cache_memory_bytes", 4 * 2**30),
        ({"engine": {"kvMemory": "1.5G"}}, "kv_cache_memory_bytes", 1_500_000_000),
        ({"engine": {"memoryFraction": 0.25}}, "gpu_memory_utilization", 0.25),
        ({"engine": {"blockSize": 32}}, "block_size", 32),
        ({"engine": {"maxBatchedTokens": 512}}, "max_num_batched_tokens", 512),
        ({"engine": {"stepTargetMilliseconds": 0}}, "step_target_ms", 0),
        ({"engine": {"maxSequences": 8}}, "max_num_seqs", 8),
        ({"engine": {"maxWaiting": 3}}, "max_num_waiting", 3),
        ({"engine": {"prefixCaching": False}}, "enable_prefix_caching", False),
        ({"engine": {"schedulingPolicy": "priority"}}, "scheduling_policy", "priority"),
        ({"engine": {"extraArgs": {"num_threads": 3}}}, "num_threads", 3),
        ({"accelerators": {"type": "nvidia.com/gpu"}}, "device", "cuda"),
        ({}, "kv_cpu_bytes", None),
        ({"kvCache": {"tiers": {"cpu": {"bytes": "16Gi"}}}}, "kv_cpu_bytes", 16 * 2**30),
        ({"kvCache": {"tiers": {"filesystem": {"bytes": "200G", "claim": "c"}}}}, "kv_fs_path", "/kv"),
        ({"kvCache": {"tiers": {"filesystem": {"bytes": "200G", "claim": "c"}}}}, "kv_fs_bytes", 200 * 10**9),
        ({"kvCache": {"tiers": {"filesystem": {"bytes": "1Gi", "path": "/var/kv"}}}}, "kv_fs_path", "/kv"),
        ({"kvCache": {"store": "mooncake://s:50051"}}, "kv_store", "mooncake://s:50051"),
        ({}, "kv_cache_dtype", None),
        ({"kvCache": {"dtype": "fp8"}}, "kv_cache_dtype", "fp8"),
        ({"kvCache": {"dtype": "int4"}}, "kv_cache_dtype", "int4"),
    ],
)
def test_engine_arguments(changes: dict[str, Any], argument: str, value: Any) -> None:
    assert config_of(changes).engine.get(argument) == value


@pytest.mark.parametrize(
    ("changes", "path", "value"),
    [
        ({}, "namespace", "prod"),
        ({}, "service", "chat"),
        ({}, "revision", "aaaaaaa"),
        ({}, "model.served_names", ["chat"]),
        ({"model": {"servedNames": ["a", "b"]}}, "model.served_names", ["a", "b"]),
        ({}, "model.source", "hf://org/name"),
        ({"model": {"source": "pvc://w/m"}}, "model.source", "file:///models/m"),
        ({"model": {"source": "file:///x"}}, "model.source", "file:///x"),
        ({}, "model.cache_dir", "/cache"),
        ({"parallelism": {"tensor": 4, "pipeline": 2}, "accelerators": {"perNode": 2}}, "layout.tensor", 4),
        ({"parallelism": {"tensor": 4, "pipeline": 2}, "accelerators": {"perNode": 2}}, "layout.pipeline", 2),
        ({"parallelism": {"tensor": 4, "pipeline": 2}, "accelerators": {"perNode": 2}}, "layout.per_node", 2),
        ({"parallelism": {"data": 3}}, "layout.data", 3),
        ({"parallelism": {"expert": 4, "tensor": 2}, "accelerators": {"perNode": 2}}, "layout.data", 2),
        ({}, "endpoint.port", 8000),
        ({"endpoint": {"port": 8080}}, "endpoint.port", 8000),
        ({"endpoint": {"port": 8080}}, "endpoint.service_url", "http://chat.prod.svc.cluster.local:8000"),
        ({"endpoint": {"tlsSecret": "t"}}, "endpoint.service_url", "https://chat.prod.svc.cluster.local:8000"),
        ({"endpoint": {"tlsSecret": "t"}}, "endpoint.tls_cert_file", "/etc/starling-tls/tls.crt"),
        ({"endpoint": {"tlsSecret": "t"}}, "endpoint.tls_key_file", "/etc/starling-tls/tls.key"),
        ({}, "endpoint.tls_cert_file", None),
        ({}, "endpoint.api_key_file", None),
        ({"endpoint": {"apiKeySecret": {"name": "s", "key": "keys"}}}, "endpoint.api_key_file", "/etc/starling-keys/keys"),
        ({"endpoint": {"allowedOrigins": ["*"]}}, "endpoint.allowed_origins", ["*"]),
        ({}, "endpoint.allowed_hosts", []),
        (
            {"endpoint": {"allowedHosts": ["*.example.org"]}},
            "endpoint.allowed_hosts",
            ["*.example.org", "chat", "chat.prod", "chat.prod.svc", "chat.prod.svc.cluster.local"],
        ),
        ({}, "endpoint.prefix_cache_salt", "key"),
        ({"endpoint": {"prefixCacheSalt": "none"}}, "endpoint.prefix_cache_salt", "none"),
        ({}, "endpoint.tool_call_parser", "auto"),
        ({"endpoint": {"toolCallParser": "hermes"}}, "endpoint.tool_call_parser", "hermes"),
        ({}, "endpoint.reasoning_parser", "auto"),
        ({"endpoint": {"reasoningParser": "none"}}, "endpoint.reasoning_parser", "none"),
        ({"endpoint": {"wholeToolCalls": True}}, "endpoint.whole_tool_calls", True),
        ({}, "endpoint.max_stored_bytes", 64 * MIB),
        ({}, "endpoint.stored_response_seconds", 30 * 86400),
        ({}, "endpoint.response_store", None),
        ({"endpoint": {"responseStore": {"bytes": "1Ki", "seconds": 60}}}, "endpoint.max_stored_bytes", 1024),
        ({"endpoint": {"responseStore": {"seconds": 60}}}, "endpoint.stored_response_seconds", 60),
        ({"endpoint": {"responseStore": {"claim": "c"}}}, "endpoint.response_store", "/responses/prod/chat"),
        ({"endpoint": {"responseStore": {"path": "/var/r"}}}, "endpoint.response_store", "/responses/prod/chat"),
        ({}, "endpoint.rate_limit", None),
        ({"endpoint": {"limits": {"rate": "600/m"}}}, "endpoint.rate_limit", {"requests": 600, "seconds": 60}),
        ({}, "endpoint.max_body_bytes", 32 * MIB),
        ({"endpoint": {"limits": {"maxBodyBytes": "1Ki"}}}, "endpoint.max_body_bytes", 1024),
        ({"endpoint": {"limits": {"readSeconds": 5}}}, "endpoint.read_seconds", 5),
        ({"endpoint": {"limits": {"connectionSeconds": 5}}}, "endpoint.connection_seconds", 5),
        ({}, "admin.token_file", "/etc/starling-admin/token"),
        ({}, "admin.port", 8001),
        ({"drain": {"acceptSeconds": 1, "seconds": 9}}, "drain.seconds", 9),
        ({"drain": {"acceptSeconds": 1, "seconds": 9}}, "drain.accept_seconds", 1),
        ({"recovery": {"progressTimeoutSeconds": 90}}, "recovery.progress_timeout_seconds", 90),
    ],
)
def test_agent_json(changes: dict[str, Any], path: str, value: Any) -> None:
    found: Any = json.loads(config_of(changes).model_dump_json())
    for name in path.split("."):
        found = found[name]
    assert found == value


@pytest.mark.parametrize(("unit", "size", "replicas"), [("data", 4, 1), ("data", 8, 7), ("expert", 8, 0)])
def test_nothing_that_changes_live_is_in_what_pods_mount(unit: str, size: int, replicas: int) -> None:
    elastic = {"min": 2, "max": 8}
    changes = {"parallelism": {unit: size, "tensor": 2, "elastic": elastic}, "replicas": replicas}
    smallest = {"parallelism": {unit: 2, "tensor": 2, "elastic": elastic}}
    assert config_of(changes) == config_of(smallest)
    assert pod_of(changes) == pod_of(smallest)


@pytest.mark.parametrize(
    ("parallelism", "layout"),
    [
        ({"data": 4}, (4, None)),
        ({"expert": 8, "tensor": 2}, (4, None)),
        ({"data": 4, "elastic": {"min": 1, "max": 8}}, (1, (1, 8))),
        ({"expert": 4, "tensor": 2, "elastic": {"min": 2, "max": 8}}, (1, (1, 4))),
    ],
)
def test_the_size_in_agent_json(parallelism: dict[str, Any], layout: tuple[int, tuple[int, int] | None]) -> None:
    """Sizes are data parallel ranks. Within elastic bounds the leader gets the size by a call."""
    made = config_of({"parallelism": parallelism}).layout
    assert (made.data, made.elastic and (made.elastic.min, made.elastic.max)) == layout


def test_the_pod_is_restricted() -> None:
    pod = pod_of()
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "fsGroup": 65532,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert agent_of()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
    assert kinds == {"configMap", "secret", "emptyDir"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("serviceAccountName", "chat-agent"),
        ("enableServiceLinks", False),
        ("terminationGracePeriodSeconds", 5 + 120 + 15),
    ],
)
def test_the_pod(field: str, value: Any) -> None:
    assert pod_of()[field] == value


def test_the_agent_is_started_with_its_configuration() -> None:
    agent = agent_of()
    assert agent["command"] == ["starling", "agent", "--config", "/etc/starling/agent.json"]
    assert agent["image"] == SETTINGS.agent_image
    assert agent_of({"image": "mine:3"})["image"] == "mine:3"
    assert agent["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert {port["name"]: port["containerPort"] for port in agent["ports"]} == {"http": 8000, "admin": 8001}


def test_who_the_pod_is_comes_from_the_downward_api() -> None:
    found = {variable["name"]: variable for variable in agent_of()["env"]}
    paths = {name: found[name]["valueFrom"]["fieldRef"]["fieldPath"] for name in found if name != "HOME"}
    assert paths == {
        "STARLING_POD_NAME": "metadata.name",
        "STARLING_POD_IP": "status.podIP",
        "STARLING_NAMESPACE": "metadata.namespace",
        "STARLING_GROUP": "metadata.labels['serving.starling.dev/group']",
        "STARLING_HOST": "spec.nodeName",
    }


@pytest.mark.parametrize(
    ("probe", "path", "port"),
    [("startupProbe", "/live", "admin"), ("livenessProbe", "/live", "admin"), ("readinessProbe", "/ready", "admin")],
)
def test_probes_ask_the_admin_server(probe: str, path: str, port: str) -> None:
    request = agent_of()[probe]["httpGet"]
    assert (request["path"], request["port"]) == (path, port)


def test_pods_leave_a_dead_node_after_half_a_minute() -> None:
    tolerated = {toleration["key"]: toleration["tolerationSeconds"] for toleration in pod_of()["tolerations"]}
    assert tolerated == {"node.kubernetes.io/not-ready": 30, "node.kubernetes.io/unreachable": 30}


@pytest.mark.parametrize(
    ("changes", "volume", "expected"),
    [
        ({}, "config", ({"configMap": {"name": "chat-aaaaaaa"}}, "/etc/starling", True)),
        (
            {},
            "admin",
            (
                {"secret": {"secretName": secret_name("chat", TOKEN), "items": [{"key": "token", "path": "token"}]}},
                "/etc/starling-admin",
                True,
            ),
        ),
        ({}, "tmp", ({"emptyDir": {"sizeLimit": "4Gi"}}, "/tmp", False)),
        ({}, "home", ({"emptyDir": {"sizeLimit": "4Gi"}}, "/home/starling", False)),
        ({}, "shm", ({"emptyDir": {"medium": "Memory", "sizeLimit": str(64 * MIB)}}, "/dev/shm", False)),
        ({}, "cache", ({"emptyDir": {}}, "/cache", False)),
        ({"model": {"cache": {"sizeLimit": "5Gi"}}}, "cache", ({"emptyDir": {"sizeLimit": "5Gi"}}, "/cache", False)),
        ({"model": {"cache": {"claim": "c"}}}, "cache", ({"persistentVolumeClaim": {"claimName": "c"}}, "/cache", False)),
        (
            {"model": {"cache": {"hostPath": "/var/x"}}},
            "cache",
            ({"hostPath": {"path": "/var/x", "type": "DirectoryOrCreate"}}, "/cache", False),
        ),
        (
            {"model": {"source": "pvc://w/m"}},
            "model",
            ({"persistentVolumeClaim": {"claimName": "w", "readOnly": True}}, "/models", True),
        ),
        (
            {"endpoint": {"apiKeySecret": {"name": "s", "key": "k"}}},
            "api-keys",
            ({"secret": {"secretName": "s", "items": [{"key": "k", "path": "k"}], "optional": True}}, "/etc/starling-keys", True),
        ),
        (
            {"kvCache": {"tiers": {"filesystem": {"bytes": "1Gi", "claim": "c"}}}},
            "kv",
            ({"persistentVolumeClaim": {"claimName": "c"}}, "/kv", False),
        ),
        (
            {"kvCache": {"tiers": {"filesystem": {"bytes": "1Gi", "path": "/var/kv"}}}},
            "kv",
            ({"hostPath": {"path": "/var/kv", "type": "DirectoryOrCreate"}}, "/kv", False),
        ),
        (
            {"endpoint": {"responseStore": {"claim": "c"}}},
            "responses",
            ({"persistentVolumeClaim": {"claimName": "c"}}, "/responses", False),
        ),
        (
            {"endpoint": {"responseStore": {"path": "/var/r"}}},
            "responses",
            ({"hostPath": {"path": "/var/r", "type": "DirectoryOrCreate"}}, "/responses", False),
        ),
        ({"endpoint": {"tlsSecret": "t"}}, "tls", ({"secret": {"secretName": "t", "optional": True}}, "/etc/starling-tls", True)),
    ],
)
def test_volumes(changes: dict[str, Any], volume: str, expected: Any) -> None:
    assert mounts_of(changes)[volume] == expected


def test_the_hub_s_token_and_pull_secrets() -> None:
    changes = {"model": {"tokenSecret": {"name": "hub", "key": "t"}, "pullSecrets": ["a", "b"]}}
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "t"}}} in agent_of(changes)["env"]
    assert pod_of(changes)["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]
    assert "imagePullSecrets" not in pod_of()


@pytest.mark.parametrize(
    ("accelerators", "limits"),
    [
        ({}, None),
        ({"type": "cpu"}, None),
        ({"type": "nvidia.com/gpu"}, {"nvidia.com/gpu": "1"}),
        ({"type": "amd.com/gpu"}, {"amd.com/gpu": "1"}),
    ],
)
def test_devices_are_counted_in_limits(accelerators: dict[str, Any], limits: dict[str, str] | None) -> None:
    assert agent_of({"accelerators": accelerators})["resources"].get("limits") == limits


def resources_of(resources: dict[str, Any], **changes: Any) -> Any:
    template = {"spec": {"containers": [{"name": "agent", "resources": resources}]}}
    return agent_of({"template": template, **changes})["resources"]


@pytest.mark.parametrize(
    ("resources", "changes", "expected"),
    [
        ({}, {}, {"requests": {"cpu": "250m", "memory": str(512 * MIB)}}),
        ({}, {"engine": {"kvMemory": "1Gi"}}, {"requests": {"cpu": "250m", "memory": str(1536 * MIB)}}),
        (
            {},
            {"engine": {"kvMemory": "1Gi"}, "kvCache": {"tiers": {"cpu": {"bytes": "2Gi"}}}},
            {"requests": {"cpu": "250m", "memory": str(3584 * MIB)}},
        ),
        (
            {},
            {"accelerators": {"type": "nvidia.com/gpu"}, "engine": {"kvMemory": "1Gi"}},
            {"limits": {"nvidia.com/gpu": "1"}, "requests": {"cpu": "250m", "memory": str(512 * MIB)}},
        ),
        (
            {},
            {"model": {"cache": {"sizeLimit": "5Gi"}}},
            {"requests": {"cpu": "250m", "memory": str(512 * MIB), "ephemeral-storage": "5Gi"}},
        ),
        ({"limits": {"memory": "256Mi"}}, {}, {"limits": {"memory": "256Mi"}, "requests": {"cpu": "250m"}}),
        ({"requests": {"cpu": "4"}}, {}, {"requests": {"cpu": "4", "memory": str(512 * MIB)}}),
        ({"limits": {"cpu": "2", "memory": "8Gi"}}, {}, {"limits": {"cpu": "2", "memory": "8Gi"}}),
    ],
)
def test_a_pod_requests_what_nobody_has_said(resources: dict[str, Any], changes: dict[str, Any], expected: dict[str, Any]) -> None:
    assert resources_of(resources, **changes) == expected


def test_a_pod_with_several_ranks_requests_for_each() -> None:
    changes = {"accelerators": {"perNode": 2}, "parallelism": {"tensor": 2}, "engine": {"kvMemory": "1Gi"}}
    assert resources_of({}, **changes)["requests"] == {"cpu": "500m", "memory": str(3072 * MIB)}


def test_groups_are_spread_by_their_leaders() -> None:
    found = pod_of()["topologySpreadConstraints"]
    assert [each["topologyKey"] for each in found] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    leaders = {
        "serving.starling.dev/service": "chat",
        "serving.starling.dev/revision": "aaaaaaa",
        "apps.kubernetes.io/pod-index": "0",
    }
    for each in found:
        assert each["whenUnsatisfiable"] == "ScheduleAnyway" and each["labelSelector"] == {"matchLabels": leaders}


@pytest.mark.parametrize(
    ("changes", "volumes"), [({}, "tmp,home,shm,cache"), ({"model": {"cache": {"claim": "c"}}}, "tmp,home,shm")]
)
def test_an_autoscaler_may_take_a_node_in_spite_of_scratch_volumes(changes: dict[str, Any], volumes: str) -> None:
    made = pod_template(make_service(), make_spec(changes), SETTINGS, "aaaaaaa")
    name = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
    assert made["metadata"]["annotations"][name] == volumes


def test_pods_with_devices_tolerate_the_taint_of_these() -> None:
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert taint in pod_of({"accelerators": {"type": "nvidia.com/gpu"}})["tolerations"]
    assert taint not in pod_of()["tolerations"]


def test_a_platform_may_choose_the_user() -> None:
    made = pod_template(make_service(), make_spec(), replace(SETTINGS, fixed_user=False), "aaaaaaa")
    context = made["spec"]["securityContext"]
    assert context["runAsNonRoot"] and not {"runAsUser", "runAsGroup", "fsGroup"} & set(context)


def test_an_overlay_cannot_take_a_pod_out_of_its_service() -> None:
    labels = {"serving.starling.dev/role": None, "serving.starling.dev/service": "other", "team": "x"}
    made = pod_template(make_service(), make_spec({"template": {"metadata": {"labels": labels}}}), SETTINGS, "aaaaaaa")
    assert made["metadata"]["labels"]["serving.starling.dev/role"] == "serving"
    assert made["metadata"]["labels"]["serving.starling.dev/service"] == "chat"
    assert made["metadata"]["labels"]["team"] == "x"


@pytest.mark.parametrize(
    ("per_node", "limit", "size"),
    [
        (1, None, 64 * MIB),
        (1, 8 * 1024 * MIB, 64 * MIB),
        (1, 256 * MIB, 32 * MIB),
        (1, 1 * MIB, 1 * MIB),
        (2, None, 576 * MIB),
        (8, None, 2112 * MIB),
        (8, 8 * 1024 * MIB, 1024 * MIB),
    ],
)
def test_shared_memory_fits_the_memory_limit(per_node: int, limit: int | None, size: int) -> None:
    assert shm_bytes(per_node, limit) == size


def test_the_memory_limit_is_read_from_the_overlay() -> None:
    limits = {"containers": [{"name": "agent", "resources": {"limits": {"memory": "256Mi"}}}]}
    assert mounts_of({"template": {"spec": limits}})["shm"][0]["emptyDir"]["sizeLimit"] == str(32 * MIB)
