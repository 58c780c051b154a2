"""`agent.json` of a revision."""

from typing import Any

from starling_agent.contract.config import (
    ENDPOINT_PORT,
    AdminConfig,
    AgentConfig,
    DrainConfig,
    ElasticConfig,
    EndpointConfig,
    LayoutConfig,
    ModelSourceConfig,
    RateConfig,
    RecoveryConfig,
)
from starling_crds.quantity import parse_quantity
from starling_crds.rate import parse_rate
from starling_crds.spec_layout import elastic_sizes, group_layout
from starling_crds.v1alpha1.engine_arguments import TypedArgument, typed_arguments
from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan import names
from starling_operator.plan.observed import Service, Settings
from starling_operator.plan.source import parse_source

CACHE_PATH = "/cache"
KV_PATH = "/kv"
RESPONSES_PATH = "/responses"
ADMIN_PATH = "/etc/starling-admin"
KEYS_PATH = "/etc/starling-keys"
TLS_PATH = "/etc/starling-tls"
PIN_PATH = "/etc/starling-pin"
PIN_KEY = "commit"
TOKEN_KEY = "token"
DEVICES = {"cpu": "cpu", "nvidia.com/gpu": "cuda"}
"""The engine's device for each type of accelerator."""
_OTHER_SECTIONS = ("model.source", "parallelism.", "recovery.")
"""Fields, and beginnings of fields, that are not in the section `engine` of agent.json."""


def typed_field(argument: str) -> str | None:
    """Returns the field of the spec that sets this engine argument; None: only `extraArgs` can."""
    typed = typed_arguments().get(argument)
    return None if typed is None else typed.field


def in_words_of_the_spec(cause: str) -> str:
    """Returns an agent's words; where they begin with an engine argument that a field sets, with that field before it."""
    name, _, rest = cause.removeprefix("engine.").partition(": ")
    field = typed_field(name)
    return cause if field is None else f"spec.{field} ({name}): {rest}"


def engine_arguments(spec: InferenceServiceSpec) -> dict[str, Any]:
    """Returns EngineArgs by name, without those of other sections; None, the engine's own default, is left out.

    Raises ValueError naming the field.
    """
    arguments = {
        name: _value(typed, spec) for name, typed in typed_arguments().items() if not typed.field.startswith(_OTHER_SECTIONS)
    }
    arguments["device"] = DEVICES.get(spec.accelerators.type)
    if spec.kv_cache.tiers.filesystem is not None:
        arguments["kv_fs_path"] = KV_PATH
    split = spec.parallelism
    if split.expert is not None and (split.expert > split.tensor or split.elastic is not None):
        arguments["enable_expert_parallel"] = True
    return {name: value for name, value in arguments.items() if value is not None} | spec.engine.extra_args


def _value(typed: TypedArgument, spec: InferenceServiceSpec) -> Any:
    """Returns the argument's value; a quantity such as 4Gi in bytes."""
    value = typed.value_in(spec)
    if not (typed.kind is int and isinstance(value, str)):
        return value
    try:
        return parse_quantity(value)
    except ValueError as error:
        raise ValueError(f"{typed.field}: {error}") from None


def agent_config(service: Service, spec: InferenceServiceSpec, settings: Settings, revision: str) -> AgentConfig:
    """Returns the configuration of every pod of the revision. Neither replicas nor a size within elastic bounds may be in it."""
    source = parse_source(spec.model.source)
    return AgentConfig(
        namespace=service.namespace,
        service=service.name,
        revision=revision,
        model=ModelSourceConfig(
            source=source.url,
            cache_dir=CACHE_PATH,
            served_names=list(spec.model.served_names) or [service.name],
            pin_file=f"{PIN_PATH}/{PIN_KEY}" if source.is_mutable else None,
        ),
        engine=engine_arguments(spec),
        layout=_layout(spec),
        endpoint=_endpoint(service, spec, settings),
        admin=AdminConfig(token_file=f"{ADMIN_PATH}/{TOKEN_KEY}"),
        drain=DrainConfig(accept_seconds=spec.drain.accept_seconds, seconds=spec.drain.seconds),
        recovery=RecoveryConfig(progress_timeout_seconds=spec.recovery.progress_timeout_seconds),
    )


def _layout(spec: InferenceServiceSpec) -> LayoutConfig:
    split, per_node = spec.parallelism, spec.accelerators.per_node
    layout = LayoutConfig(tensor=split.tensor, pipeline=split.pipeline, per_node=per_node)
    if split.elastic is None:
        return layout.model_copy(update={"data": group_layout(split, per_node).data})
    sizes = elastic_sizes(split, per_node)
    return layout.model_copy(update={"elastic": ElasticConfig(min=sizes[0], max=sizes[-1])})


def _endpoint(service: Service, spec: InferenceServiceSpec, settings: Settings) -> EndpointConfig:
    """Agents reach the Service at the port that never changes: `spec.endpoint.port` may change without new pods."""
    key, tls, limits = spec.endpoint.api_key_secret, spec.endpoint.tls_secret, spec.endpoint.limits
    host, store = names.host(service.name, service.namespace, settings.cluster_domain), spec.endpoint.response_store
    folder = f"{RESPONSES_PATH}/{service.namespace}/{service.name}"  # services may share a claim, and none sees another's
    return EndpointConfig(
        allowed_origins=list(spec.endpoint.allowed_origins),
        allowed_hosts=allowed_hosts(spec, host),
        prefix_cache_salt=spec.endpoint.prefix_cache_salt,
        tool_call_parser=spec.endpoint.tool_call_parser,
        reasoning_parser=spec.endpoint.reasoning_parser,
        whole_tool_calls=spec.endpoint.whole_tool_calls,
        max_stored_bytes=parse_quantity(store.bytes),
        stored_response_seconds=store.seconds,
        response_store=folder if store.path is not None or store.claim is not None else None,
        rate_limit=_rate(limits.rate),
        max_body_bytes=parse_quantity(limits.max_body_bytes),
        read_seconds=limits.read_seconds,
        connection_seconds=limits.connection_seconds,
        api_key_file=f"{KEYS_PATH}/{key.key}" if key else None,
        tls_cert_file=f"{TLS_PATH}/tls.crt" if tls else None,
        tls_key_file=f"{TLS_PATH}/tls.key" if tls else None,
        api_key_secret=key.name if key else None,
        tls_secret=tls,
        routers_only=has_tenants(spec),
        service_url=f"{'https' if tls else 'http'}://{host}:{ENDPOINT_PORT}",
    )


def has_tenants(spec: InferenceServiceSpec) -> bool:
    """Returns whether routers alone have the API keys, so that no agent may answer anybody else."""
    return spec.router is not None and bool(spec.router.tenants)


def _rate(text: str | None) -> RateConfig | None:
    if text is None:
        return None
    requests, seconds = parse_rate(text)
    return RateConfig(requests=requests, seconds=seconds)


def allowed_hosts(spec: InferenceServiceSpec, host: str) -> list[str]:
    """Adds the Service's name in each of its lengths, which clients in the cluster and the pods use."""
    if not spec.endpoint.allowed_hosts:
        return []
    labels = host.split(".")
    return [*spec.endpoint.allowed_hosts, *(".".join(labels[:count]) for count in (1, 2, 3)), host]
