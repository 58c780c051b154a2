"""Manifests that are refused, with the field that is to blame and words of what is possible there."""

from dataclasses import dataclass
from typing import Any

from starling_crds.v1alpha1.engine_arguments import typed_arguments

from tests.crds.manifests import service


@dataclass(frozen=True)
class Bad:
    """`says` is in the API server's message, `locally` in that of `starling plan`; rules are said once, so both are the same."""

    body: dict[str, Any]
    field: str
    says: str
    locally: str
    unknown: bool = False

    def __str__(self) -> str:
        return f"{self.field}-{self.says}"[:70]


def bad(field: str, value: Any, says: str, locally: str | None = None, *, at: str = "", **others: Any) -> Bad:
    """`spec.<field>: value`; `at` is the field to blame where that is another one; others write a__b for a.b."""
    changes = {name.replace("__", "."): other for name, other in others.items()} | {field: value}
    return Bad(service(changes), f"spec.{at or field}", says, locally or says)


def typed(field: str, value: Any, kind: str, locally: str) -> Bad:
    return bad(field, value, f"must be of type {kind}", f"must be {locally}")


def one_of(field: str, value: Any, *words: str, **others: Any) -> Bad:
    """The API server quotes what it supports, which a person reads as the same."""
    return bad(field, value, ", ".join(f'"{word}"' for word in words), f"{', '.join(words[:-1])} or {words[-1]}", **others)


def unknown(field: str, value: Any, locally: str) -> Bad:
    return Bad(service({field: value}), f"spec.{field}", f'unknown field "spec.{field}"', f"possible are {locally}", unknown=True)


def named(name: str) -> Bad:
    return Bad(service(name=name), "metadata.name", "at most 40 lowercase letters", "at most 40 lowercase letters")


_EXAMPLE: dict[type, Any] = {str: "x", int: 8, bool: False, float: 0.5}
SOURCE = "must be hf://org/name[:file.gguf][@revision], pvc://claim/path or file:///path"
SIZE = "must be bytes or a quantity such as 4Gi or 500M"
NAME = "must be the name of an object"
FOLDER = "must be an absolute folder below /"
ONLY_HUB = "is only for models that are downloaded (hf://org/name)"
SECRET = {"name": "s", "key": "k"}
TIER = "kvCache.tiers.filesystem"
ROUTER_TLS = "is not possible with router"
POOL = {"backend": "InferencePool"}
CANARY = {"steps": [{"weight": 5}]}
STICKY = ('"key", "session", "none"', "key, session or none")
ELASTIC = {"data": 1, "elastic": {"min": 1, "max": 2}}
TENANT_KEYS = {"tenantKeysSecret": "keys"}
WITHOUT_PREFIXES = "needs engine.prefixCaching"
AGENT = "cannot be set for the container agent"


def agent(**fields: Any) -> list[dict[str, Any]]:
    return [{"name": "agent", **fields}]


NAMES = [
    named("a" * 41),
    named("1chat"),
    named("my.chat"),
]
MODEL = [
    Bad(service({"model": {}}), "spec.model.source", "Required value", "is required"),
    Bad({**service(), "spec": {}}, "spec.model", "Required value", "is required"),
    typed("model", "hf://org/name", "object", "a map"),
    typed("model.source", 5, "string", "a string"),
    *(
        bad("model.source", source, SOURCE)
        for source in (
            "",
            "org/name",
            "hf://name",
            "hf://org/name/more",
            "hf://org/name@",
            "hf://org/name:file",
            "hf://org/",
            "HF://org/name",
            "https://huggingface.co/org/name",
            "s3://bucket/key",
            "pvc://claim",
            "pvc://claim/",
            "pvc://Claim/path",
            "pvc:///path",
            "file://relative",
            "file:/path",
            "/opt/model",
        )
    ),
    bad("model.source", "pvc://claim/../other", "must not climb by .."),
    bad("model.source", "file:///opt/..", "must not climb by .."),
    bad("model.source", "hf://org/" + "n" * 1024, "1024"),
    bad("model.servedNames", ["a", "b", "a"], "name each model once"),
    bad("model.servedNames", [f"n{i}" for i in range(17)], "at most 16", "at most 16"),
    bad("model.servedNames", [""], "at least 1 char", "at least 1 char", at="model.servedNames[0]"),
    bad("model.servedNames", ["a", "b c"], "a name without white space", at="model.servedNames[1]"),
    typed("model.servedNames", "chat", "array", "a list"),
    one_of("model.dtype", "int8", "auto", "float32", "bfloat16", "float16"),
    bad("model.maxLength", 0, "greater than or equal to 1", "at least 1"),
    bad("model.maxLength", 2**24 + 1, "less than or equal to 16777216", "at most 16777216"),
    typed("model.maxLength", "4k", "integer", "a whole number"),
    *(
        bad("model.classifierFromToken", tokens, "must be one token, or two with a comma between them")
        for tokens in ("", " ", "no,", ",yes", "a,b,c")
    ),
    typed("model.trustRemoteCode", "no", "boolean", "true or false"),
    bad("model.tokenSecret", {"name": "s"}, "Required value", "is required", at="model.tokenSecret.key"),
    bad("model.tokenSecret", {"name": "S", "key": "k"}, NAME, at="model.tokenSecret.name"),
    bad("model.tokenSecret", {"name": "s", "key": "a/b"}, "must be a key of a Secret", at="model.tokenSecret.key"),
    bad("model.tokenSecret", SECRET, ONLY_HUB, model__source="file:///opt/model"),
    bad("model.pullSecrets", ["a_b"], NAME, at="model.pullSecrets[0]"),
    bad("model.pullSecrets", [f"n{i}" for i in range(9)], "at most 8"),
]
CACHE = [
    bad("model.cache.hostPath", "/cache", "at most one of claim and hostPath", model__cache__claim="c"),
    bad("model.cache.sizeLimit", "5Gi", "only possible without claim and hostPath", model__cache__claim="c"),
    bad("model.cache.sizeLimit", "5Gi", "only possible without claim and hostPath", model__cache__hostPath="/c"),
    bad("model.cache.sizeLimit", "5GB", SIZE),
    bad("model.cache.hostPath", "cache", FOLDER),
    bad("model.cache.hostPath", "/", FOLDER),
    bad("model.cache.hostPath", "/var/../etc", "must not climb by .."),
    bad("model.cache.claim", "My_Claim", NAME),
    bad("model.cache.claim", "", "at least 1 char"),
    bad("model.cache.claim", "c", ONLY_HUB, model__source="pvc://claim/path"),
    bad("model.cache.hostPath", "/c", ONLY_HUB, model__source="file:///opt/model"),
    bad("model.cache.sizeLimit", "5Gi", ONLY_HUB, model__source="file:///opt/model"),
]
LAYOUT = [
    bad("replicas", -1, "greater than or equal to 0", "at least 0"),
    bad("replicas", 1001, "less than or equal to 1000", "at most 1000"),
    typed("replicas", "two", "integer", "a whole number"),
    typed("replicas", 1.5, "integer", "a whole number"),
    bad("parallelism.tensor", 0, "greater than or equal to 1", "at least 1"),
    bad("parallelism.pipeline", 1025, "less than or equal to 1024", "at most 1024"),
    bad("parallelism.data", 0, "greater than or equal to 1", "at least 1"),
    bad("parallelism.expert", 4097, "less than or equal to 4096", "at most 4096"),
    bad("parallelism.data", 2, "at most one of data and expert", parallelism__expert=2),
    bad("parallelism.expert", 3, "must be a multiple of tensor (2), got 3", parallelism__tensor=2),
    bad("parallelism.elastic", {"min": 1, "max": 4}, "give one of them too"),
    bad("parallelism.elastic", {"min": 4, "max": 1}, "must be at most max (1)", at="parallelism.elastic.min", parallelism__data=2),
    bad("parallelism.elastic", {"min": 1}, "Required value", "is required", at="parallelism.elastic.max", parallelism__data=1),
    bad("parallelism.data", 5, "must be within elastic.min (1) and elastic.max (4)", parallelism__elastic={"min": 1, "max": 4}),
    bad("parallelism.expert", 2, "must be within elastic.min (4) and elastic.max (8)", parallelism__elastic={"min": 4, "max": 8}),
    bad(
        "parallelism.elastic",
        {"min": 1, "max": 4},
        "must be a multiple of tensor (2)",
        at="parallelism.elastic.min",
        parallelism__tensor=2,
        parallelism__expert=2,
    ),
    bad(
        "parallelism.elastic",
        {"min": 4, "max": 6},
        "fill whole nodes of accelerators.perNode (4), got 6",
        at="parallelism.elastic.max",
        parallelism__expert=4,
        accelerators__perNode=4,
    ),
    bad(
        "parallelism.elastic",
        {"min": 3, "max": 4},
        "fill whole nodes of accelerators.perNode (4), got 3",
        at="parallelism.elastic.min",
        parallelism__expert=4,
        accelerators__perNode=4,
    ),
    bad(
        "parallelism.elastic",
        {"min": 2, "max": 5},
        "must be a multiple of tensor (2)",
        at="parallelism.elastic.max",
        parallelism__tensor=2,
        parallelism__expert=2,
    ),
    bad("accelerators.perNode", 0, "greater than or equal to 1", "at least 1"),
    bad("accelerators.perNode", 65, "less than or equal to 64", "at most 64"),
    bad(
        "accelerators.perNode",
        3,
        "must divide parallelism.pipeline (1) * parallelism.tensor (2) or be a multiple of it, got 3",
        parallelism__tensor=2,
    ),
    bad(
        "accelerators.perNode",
        4,
        "must divide parallelism.pipeline (3) * parallelism.tensor (2) or be a multiple of it, got 4",
        parallelism={"tensor": 2, "pipeline": 3, "data": 2},
    ),
    bad("accelerators.perNode", 8, "must divide the ranks of a group", parallelism__tensor=2, parallelism__data=3),
    bad("accelerators.perNode", 4, "must divide the ranks of a group", parallelism__expert=6),
    bad("parallelism", {"tensor": 1024, "pipeline": 5}, "at most 4096"),
    bad("parallelism", {"tensor": 2, "data": 4096}, "at most 4096"),
    bad("parallelism", {"tensor": 2, "expert": 4096, "pipeline": 3}, "at most 4096"),
    bad(
        "parallelism",
        {"pipeline": 2, "data": 1, "elastic": {"min": 1, "max": 2049}},
        "at most 4096, got 2049",
        at="parallelism.elastic.max",
    ),
    bad(
        "parallelism",
        {"tensor": 2, "pipeline": 3, "expert": 2, "elastic": {"min": 2, "max": 4000}},
        "at most 4096, got 4000",
        at="parallelism.elastic.max",
    ),
    bad("accelerators.type", "gpu", "must be cpu or an extended resource"),
    bad("accelerators.type", "", "at least 1 char"),
]
ENGINE = [
    *(bad("engine.kvMemory", size, SIZE) for size in ("4GB", "4 Gi", "-4Gi", "lots", "1e9")),
    bad("engine.kvMemory", "0", "must be above 0"),
    typed("engine.kvMemory", 4, "string", "a string"),
    bad("engine.memoryFraction", 0, "greater than 0", "above 0"),
    bad("engine.memoryFraction", 1.1, "less than or equal to 1", "at most 1"),
    one_of("engine.blockSize", 12, "8", "16", "32"),
    one_of("kvCache.dtype", "fp8_e5m2", "auto", "fp8", "fp8_e4m3", "int8", "int4"),
    bad("engine.stepTargetMilliseconds", -1, "greater than or equal to 0", "at least 0"),
    bad("engine.maxBatchedTokens", 128, "must be at least maxSequences (256)"),
    bad("engine.maxBatchedTokens", 2048, "must be at least maxSequences (4096)", engine__maxSequences=4096),
    bad("engine.maxSequences", 0, "greater than or equal to 1", "at least 1"),
    bad("engine.maxWaiting", 0, "greater than or equal to 1", "at least 1"),
    typed("engine.prefixCaching", "yes", "boolean", "true or false"),
    bad("engine.schedulingPolicy", "lifo", '"fcfs", "priority"', "fcfs or priority"),
    one_of("engine.speculative.method", "eagle", "ngram", "suffix"),
    bad("engine.speculative.tokens", 33, "less than or equal to 32", "at most 32", engine__speculative__method="ngram"),
    *(
        bad(
            "engine.extraArgs",
            {name: _EXAMPLE[typed.kind]},
            f"is set by spec.{typed.field}; use that",
            at=f"engine.extraArgs.{name}",
        )
        for name, typed in typed_arguments().items()
    ),
    bad("kvCache.tiers.cpu", {}, "Required value", "is required", at="kvCache.tiers.cpu.bytes"),
    bad("kvCache.tiers.cpu.bytes", "16GiB", SIZE),
    bad(TIER, {"bytes": "1Gi"}, "needs exactly one of path"),
    bad(TIER, {"bytes": "1Gi", "path": "/kv", "claim": "kv"}, "needs exactly one of path"),
    bad(TIER, {"bytes": "1Gi", "path": "kv"}, FOLDER, at=f"{TIER}.path"),
    bad(TIER, {"bytes": "lots", "path": "/kv"}, SIZE, at=f"{TIER}.bytes"),
    bad(TIER, {"bytes": "1Gi", "claim": "KV"}, NAME, at=f"{TIER}.claim"),
    bad(TIER, {"path": "/kv"}, "Required value", "is required", at=f"{TIER}.bytes"),
    bad(TIER, {"bytes": "63Mi", "path": "/kv"}, "must be at least 64Mi", at=f"{TIER}.bytes"),
    *(
        bad("kvCache.store", store, "must be mooncake://MASTER:PORT")
        for store in ("store:50051", "redis://store:6379", "mooncake://store", "mooncake://store:50051/a b", "mooncake://:50051")
    ),
    *(
        Bad(service({"engine.prefixCaching": False, field: value}), "spec.kvCache", WITHOUT_PREFIXES, WITHOUT_PREFIXES)
        for field, value in (
            ("kvCache.tiers.cpu.bytes", "1Gi"),
            (TIER, {"bytes": "1Gi", "path": "/kv"}),
            ("kvCache.store", "mooncake://s:1"),
        )
    ),
]
ENDPOINT = [
    bad("endpoint.port", 0, "greater than or equal to 1", "at least 1"),
    bad("endpoint.port", 65536, "less than or equal to 65535", "at most 65535"),
    bad("endpoint.apiKeySecret", {"key": "k"}, "Required value", "is required", at="endpoint.apiKeySecret.name"),
    bad("endpoint.apiKeySecret", {"name": "S", "key": "k"}, NAME, at="endpoint.apiKeySecret.name"),
    bad("endpoint.apiKeySecret", {"name": "s", "key": "a b"}, "must be a key of a Secret", at="endpoint.apiKeySecret.key"),
    bad("endpoint.allowedHosts", ["https://example.org"], "must be a name without scheme", at="endpoint.allowedHosts[0]"),
    bad("endpoint.allowedHosts", ["example.org:8443"], "must be a name without scheme", at="endpoint.allowedHosts[0]"),
    bad("endpoint.toolCallParser", "Hermes!", "must be auto, none, or the name of a format"),
    bad("endpoint.reasoningParser", "think-tags", "must be auto, none, or the name of a format"),
    bad("endpoint.responseStore.bytes", "0", "must be above 0"),
    bad("endpoint.responseStore.seconds", 0, "greater than or equal to 1", "at least 1"),
    bad("endpoint.responseStore", {"claim": "A"}, NAME, at="endpoint.responseStore.claim"),
    bad("endpoint.responseStore", {"path": "responses"}, "must be an absolute folder", at="endpoint.responseStore.path"),
    bad("endpoint.responseStore", {"path": "/r", "claim": "c"}, "remove path (/r) or claim (c)", at="endpoint.responseStore.claim"),
    bad("endpoint.allowedOrigins", ["example.org"], "must be * or an origin", at="endpoint.allowedOrigins[0]"),
    bad("endpoint.allowedOrigins", ["https://example.org/"], "must be * or an origin", at="endpoint.allowedOrigins[0]"),
    *(
        bad("endpoint.limits.rate", rate, "must be a rate such as 10/s")
        for rate in ("600", "0/m", "10/0s", "10/d", "ten/s", "1.5/s", "-1/s")
    ),
    bad("endpoint.limits.maxBodyBytes", "0", "must be above 0"),
    bad("endpoint.limits.maxBodyBytes", "32MiB", "must be bytes or a quantity"),
    bad("endpoint.limits.readSeconds", 0, "greater than or equal to 1", "at least 1"),
    bad("endpoint.limits.connectionSeconds", -1, "greater than or equal to 0", "at least 0"),
    typed("endpoint.limits.rate", 600, "string", "a string"),
    bad("endpoint.route", {"hostnames": ["example.org"]}, "Required value", "is required", at="endpoint.route.parentRefs"),
    bad("endpoint.route.parentRefs", [], "at least 1 items", "at least 1 entries"),
    *(
        bad("endpoint.route.parentRefs", [{"name": "a"} | part], says, at=f"endpoint.route.parentRefs[0].{next(iter(part))}")
        for part, says in (
            ({"name": "A"}, NAME),
            ({"namespace": "A"}, NAME),
            ({"sectionName": "A"}, NAME),
            ({"group": "A"}, "must be an API group"),
            ({"kind": "A b"}, "must be a kind"),
        )
    ),
    bad("endpoint.route.parentRefs", [{"port": 80}], "Required value", "is required", at="endpoint.route.parentRefs[0].name"),
    bad(
        "endpoint.route", {"parentRefs": [{"name": "a"}], "hostnames": ["a:80"]}, "without scheme", at="endpoint.route.hostnames[0]"
    ),
    *(
        bad("endpoint.route", {"parentRefs": [{"name": "a"}], **wrong}, *says, at=f"endpoint.route.{at}", router={})
        for wrong, at, says in (
            ({"timeouts": {"request": "60"}}, "timeouts.request", ("must be up to four numbers with their units",)),
            ({"timeouts": {"request": "1d"}}, "timeouts.request", ("must be up to four numbers with their units",)),
            (
                {"timeouts": {"request": "1m", "backendRequest": "60001ms"}},
                "timeouts.backendRequest",
                ("must be at most request (1m), which it is a part of, got 60001ms",),
            ),
            ({"failureMode": "FailOpen"}, "failureMode", ("must be FailClose without backend InferencePool",)),
            ({"secureServing": False}, "secureServing", ("must be true without backend InferencePool",)),
            ({"proxies": [{"labels": {}}]}, "proxies", ("is possible with backend InferencePool alone",)),
            (POOL | {"proxies": [{}]}, "proxies[0].cidr", ("must be set where neither namespace nor labels are",)),
            (
                POOL | {"proxies": [{"cidr": "10.0.0.0/8", "labels": {}}]},
                "proxies[0].cidr",
                ("must be set where neither namespace nor labels are, and only there",),
            ),
            (POOL | {"proxies": [{"cidr": "10.0.0.1"}]}, "proxies[0].cidr", ("must be a range of addresses",)),
            (POOL | {"proxies": [{"namespace": "A"}]}, "proxies[0].namespace", (NAME,)),
            *(
                (POOL | {"proxies": [{"labels": {key: "x"}}]}, "proxies[0].labels", ("must have labels' keys",))
                for key in ("bad key!", "", "a/b/c", "/a", "A.example/a", "a..b/c", "k" * 64, "d" * 254 + "/k")
            ),
            (POOL | {"parentRefs": [{"name": "g" * 64}]}, "proxies", ("must say whose a Gateway is",)),
        )
    ),
    one_of("endpoint.route.backend", "Pool", "Service", "InferencePool", endpoint__route__parentRefs=[{"name": "a"}]),
    one_of("endpoint.route.failureMode", "Open", "FailClose", "FailOpen", endpoint__route__parentRefs=[{"name": "a"}]),
    bad("endpoint.route", {"parentRefs": [{"name": "a"}]} | POOL, "must be Service without router", at="endpoint.route.backend"),
    bad("endpoint.tlsSecret", "tls_secret", NAME),
    bad("image", "", "at least 1 char"),
    bad("image", "my image", "must be an image without white space"),
]
ROUTER = [
    bad("router.replicas", 0, "greater than or equal to 1", "at least 1"),
    bad("router.replicas", 17, "less than or equal to 16", "at most 16"),
    bad("router.policy.prefix", -1, "greater than or equal to 0", "at least 0"),
    bad("router.hold.requests", -1, "greater than or equal to 0", "at least 0"),
    bad("router.hold.bytes", "256MiB", SIZE),
    bad("router.hold.bytes", "0", "must be above 0"),
    bad("router.hold.seconds", -1, "greater than or equal to 0", "at least 0"),
    bad("router.resources.requests", {"cpu": "half"}, "must be a quantity", at="router.resources.requests[cpu]"),
    bad("router.nodeSelector", {"a b": "c"}, "must have labels' keys"),
    bad("router.nodeSelector", {"arch": "a b"}, "must be a label's value", at="router.nodeSelector[arch]"),
    bad("router.priorityClassName", "High", NAME),
    *(
        bad("router.tolerations", [toleration], says, at=f"router.tolerations[0].{at}")
        for toleration, at, says in (
            ({"effect": "NoSchedule"}, "key", "must be set; without it operator must be Exists"),
            ({"key": "", "operator": "Equal"}, "key", "must be set; without it operator must be Exists"),
            ({"key": "gpu", "operator": "Exists", "value": "a"}, "value", "is not possible with operator Exists"),
            ({"key": "gpu", "effect": "NoSchedule", "tolerationSeconds": 5}, "tolerationSeconds", "needs effect NoExecute"),
        )
    ),
    bad("router", {}, ROUTER_TLS, at="endpoint.tlsSecret", endpoint__tlsSecret="tls"),
    unknown("router.image", "r:1", "replicas, policy, hold, tenants, tenantKeysSecret, resources, nodeSelector"),
    *(
        bad("router", {"tenants": [{"name": "a"} | wrong], **TENANT_KEYS}, *says, at=f"router.tenants[0].{next(iter(wrong))}")
        for wrong, says in (
            ({"name": "A"}, ("must be lowercase letters, digits and '-'",)),
            ({"priority": 1001}, ("less than or equal to 1000", "at most 1000")),
            ({"priority": -1001}, ("greater than or equal to -1000", "at least -1000")),
            ({"weight": 0}, ("must be 0.001 to 1000",)),
            ({"weight": 1001}, ("must be 0.001 to 1000",)),
            ({"tokensPerMinute": 0}, ("greater than or equal to 1", "at least 1")),
            ({"concurrent": 0}, ("greater than or equal to 1", "at least 1")),
        )
    ),
    bad("router", {"tenants": [{"name": "a"}]}, "must be set where there are tenants", at="router.tenantKeysSecret"),
    bad("router", TENANT_KEYS, "must be set where there are tenants", at="router.tenantKeysSecret"),
    bad("router", {"tenants": [{"name": "a"}], "tenantKeysSecret": "A"}, NAME, at="router.tenantKeysSecret"),
    bad(
        "router",
        {"tenants": [{"name": "a"}], **TENANT_KEYS},
        "is not possible with router.tenants",
        at="endpoint.apiKeySecret",
        endpoint__apiKeySecret=SECRET,
    ),
    bad(
        "router",
        {"tenants": [{"name": "a"}], **TENANT_KEYS},
        "must be FailClose with router.tenants",
        at="endpoint.route.failureMode",
        endpoint__route={"parentRefs": [{"name": "a"}], "failureMode": "FailOpen"} | POOL,
    ),
]
SCALING = [
    bad("scaling.idleSeconds", 9, "greater than or equal to 10", "at least 10", router={}),
    bad("scaling.idleSeconds", 604_801, "less than or equal to 604800", "at most 604800", router={}),
    bad("scaling.idleSeconds", 60, "needs router"),
    bad("scaling.standby", "asleep", "must be none without idleSeconds"),
    bad("scaling.sleepLevel", 2, "needs standby: asleep", router={}, scaling__idleSeconds=60),
    bad("scaling.sleepLevel", 3, "less than or equal to 2", "at most 2", router={}, scaling__idleSeconds=60),
    bad("router.hold.requests", 0, "must be above 0 with scaling.idleSeconds", scaling__idleSeconds=60),
    unknown("scaling.min", 0, "idleSeconds"),
]
LIFECYCLE = [
    bad("rollout", {"maxSurge": 0}, "must not both be 0", at="rollout.maxSurge"),
    bad("rollout.maxUnavailable", -1, "greater than or equal to 0", "at least 0"),
    bad("rollout.progressDeadlineSeconds", 9, "greater than or equal to 10", "at least 10"),
    typed("rollout.maxSurge", "25%", "integer", "a whole number"),
    *(
        bad("rollout.canary", {"steps": steps}, *says, at=f"rollout.canary.steps{at}", router={})
        for steps, at, *says in (
            ([], "", "at least 1 items", "at least 1 entries"),
            ([{"weight": 0}], "[0].weight", "greater than or equal to 1", "at least 1"),
            ([{"weight": 100}], "[0].weight", "less than or equal to 99", "at most 99"),
            ([{"weight": 20}, {"weight": 20}], "", "must have weights that rise"),
            ([{"weight": 20}, {"weight": 5}], "", "must have weights that rise"),
            ([{"weight": 5, "seconds": 0}], "[0].seconds", "greater than or equal to 1", "at least 1"),
            ([{"weight": 5, "maxErrorPercent": 101}], "[0].maxErrorPercent", "less than or equal to 100", "at most 100"),
            ([{"weight": 5, "maxFirstTokenRatio": 1}], "[0].maxFirstTokenRatio", "greater than or equal to 2", "at least 2"),
        )
    ),
    bad("rollout.canary", CANARY | {"stickyBy": "tenant"}, *STICKY, at="rollout.canary.stickyBy", router={}),
    bad("rollout.canary", CANARY | {"compare": "text"}, '"tokens", "slo"', "tokens or slo", at="rollout.canary.compare", router={}),
    bad("rollout.canary", CANARY, "needs router"),
    bad("rollout.canary", CANARY, "is not possible with parallelism.elastic", router={}, parallelism=ELASTIC),
    bad("rollout.pause", True, "needs rollout.canary"),
    bad("drain.seconds", 86401, "less than or equal to 86400", "at most 86400"),
    bad("drain.acceptSeconds", -1, "greater than or equal to 0", "at least 0"),
    typed("drain.seconds", "2m", "integer", "a whole number"),
    bad("recovery.restartBudget", 1001, "less than or equal to 1000", "at most 1000"),
    bad("recovery.windowSeconds", 59, "greater than or equal to 60", "at least 60"),
    bad("recovery.progressTimeoutSeconds", 0, "greater than or equal to 1", "at least 1"),
    bad("className", "Blue", "must be lowercase letters, digits"),
    typed("suspend", "true", "boolean", "true or false"),
]
TEMPLATE = [
    typed("template", "x", "object", "a map"),
    typed("template.spec", [], "object", "a map"),
    bad("template.metadata.labels", {"a": "-"}, "must be a label's value", at="template.metadata.labels[a]"),
    bad("template.metadata.labels", {"serving.starling.dev/role": "x"}, "are the operator's; use another prefix"),
    bad("template.metadata.annotations", {"serving.starling.dev/x": "x"}, "are the operator's; use another prefix"),
    bad("template.spec.containers", [{"image": "x"}], "Required value", "is required", at="template.spec.containers[0].name"),
    bad("template.spec.containers", agent(command=["sh"]), AGENT, at="template.spec.containers[0].command"),
    bad("template.spec.containers", agent(args=["--help"]), AGENT, at="template.spec.containers[0].args"),
    bad("template.spec.containers", agent(image="x"), "use spec.image", at="template.spec.containers[0].image"),
    bad("template.spec.hostNetwork", True, "must be false: pods of one node"),
    bad("template.spec.restartPolicy", "Never", '"Always"', "must be Always"),
    bad("template.spec.hostname", "x", "is set by the StatefulSet"),
    bad("template.spec.subdomain", "x", "is set by the StatefulSet"),
    bad("template.spec.terminationGracePeriodSeconds", 5, "follows from spec.drain"),
]
UNKNOWN = [
    unknown("modle", {}, "model, replicas"),
    unknown("model.revision", "main", "source, servedNames"),
    unknown("model.served_names", ["a"], "source, servedNames"),
    unknown("model.cache.path", "/x", "claim, hostPath"),
    unknown("engine.speculative.rejectionSampleMethod", "standard", "method, tokens"),
    unknown("parallelism.tp", 2, "tensor, pipeline"),
    unknown("accelerators.count", 2, "type, perNode"),
    unknown("engine.maxNumSeqs", 2, "kvMemory, memoryFraction"),
    unknown("endpoint.apiKey", "secret", "port, apiKeySecret"),
    unknown("template.nodeSelector", {}, "metadata, spec"),
    unknown("template.metadata.name", "x", "labels, annotations"),
]

ALL = [*NAMES, *MODEL, *CACHE, *LAYOUT, *ENGINE, *ENDPOINT, *ROUTER, *SCALING, *LIFECYCLE, *TEMPLATE, *UNKNOWN]
