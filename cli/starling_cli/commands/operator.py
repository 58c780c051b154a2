"""`starling operator`: the program of the operator's pod."""

import json
from enum import StrEnum
from typing import Annotated, Any

import typer

from starling_cli.commands.failures import fail


class LogLevel(StrEnum):
    """Levels of the standard library."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class PullPolicy(StrEnum):
    """Values of imagePullPolicy."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


def operator(
    agent_image: Annotated[
        str,
        typer.Option("--agent-image", envvar="STARLING_AGENT_IMAGE", help="Image for new revisions of services that name none."),
    ],
    agent_image_pull_policy: Annotated[
        PullPolicy, typer.Option("--agent-image-pull-policy", help="When nodes pull that image.")
    ] = PullPolicy.IF_NOT_PRESENT,
    router_image: Annotated[
        str,
        typer.Option(
            "--router-image",
            envvar="STARLING_ROUTER_IMAGE",
            help="Image for routers, such as the operator's own. Default: the agents'.",
        ),
    ] = "",
    router_image_pull_policy: Annotated[
        PullPolicy | None, typer.Option("--router-image-pull-policy", help="When nodes pull that image. Default: as the agents'.")
    ] = None,
    namespace: Annotated[
        list[str] | None, typer.Option("--namespace", "-n", help="Serve only this namespace; may be repeated. Default: all.")
    ] = None,
    own_namespace: Annotated[
        str | None, typer.Option("--own-namespace", envvar="POD_NAMESPACE", help="Where the Lease is. Default: the pod's.")
    ] = None,
    lease_name: Annotated[
        str, typer.Option("--lease-name", help="Operators with the same Lease exclude each other.")
    ] = "starling-operator",
    cluster_domain: Annotated[str, typer.Option("--cluster-domain", help="Of in-cluster DNS names.")] = "cluster.local",
    http_address: Annotated[str, typer.Option("--http-address", help="HOST:PORT of /healthz, /readyz and /metrics.")] = "[::]:8080",
    fixed_user: Annotated[
        bool,
        typer.Option(
            "--fixed-user/--no-fixed-user",
            help="Pods run as user 65532; not where the platform chooses users, as OpenShift.",
        ),
    ] = True,
    gang_patience: Annotated[
        float,
        typer.Option(
            "--gang-patience",
            min=1.0,
            help="Seconds that a group may hold some of its nodes while another service's waits.",
        ),
    ] = 300.0,
    class_name: Annotated[
        str, typer.Option("--class", help="Serve only services whose spec.className is this. Default: those that have none.")
    ] = "",
    api_key_secret: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key-secret",
            help="Name of Secrets with API keys that it may list; a key that is taken out is refused within 10 s. May be repeated.",
        ),
    ] = None,
    agent_metrics_from: Annotated[
        str | None,
        typer.Option(
            "--agent-metrics-from",
            help="Who may read /metrics of agents behind routers: a JSON list of NetworkPolicy peers. Default: usual scrapers.",
        ),
    ] = None,
    log_level: Annotated[LogLevel, typer.Option("--log-level", help="Least level of lines that are logged.")] = LogLevel.INFO,
) -> None:
    """Run the operator: it turns InferenceServices into groups of agent pods, and keeps them so."""
    host, _, port = http_address.rpartition(":")
    if not host or not port.isdigit():
        fail(f"--http-address must be HOST:PORT, got {http_address!r}", "write --http-address [::]:8080")
    metrics_from = _peers(agent_metrics_from) if agent_metrics_from is not None else None
    from starling_operator.main import launch
    from starling_operator.plan.observed import USUAL_SCRAPERS, Settings
    from starling_operator.settings import OperatorSettings
    from starling_operator.settings import own_namespace as pods_namespace

    plan_settings = Settings(
        agent_image=agent_image,
        router_image=router_image,
        image_pull_policy=agent_image_pull_policy.value,
        router_image_pull_policy=router_image_pull_policy.value if router_image_pull_policy is not None else "",
        cluster_domain=cluster_domain,
        operator_namespace=own_namespace or pods_namespace(),
        metrics_from=metrics_from if metrics_from is not None else USUAL_SCRAPERS,
        fixed_user=fixed_user,
        gang_patience=gang_patience,
    )
    settings = OperatorSettings(
        plan=plan_settings,
        namespaces=tuple(namespace or ()),
        class_name=class_name,
        api_key_secrets=tuple(dict.fromkeys(api_key_secret or ())),
        # Operators of different classes do not exclude each other.
        lease_name=f"{lease_name}-{class_name}" if class_name else lease_name,
        http_host=host.strip("[]"),
        http_port=int(port),
    )
    launch(settings, log_level.value)


def _peers(text: str) -> list[dict[str, Any]]:
    """Returns peers of a NetworkPolicy. An empty one, which the API server refuses, would keep every policy as it is."""
    try:
        peers = json.loads(text)
    except ValueError:
        peers = None
    if not isinstance(peers, list) or not all(isinstance(peer, dict) and peer for peer in peers):
        example = '[{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]'
        fail(f"--agent-metrics-from must be a JSON list of NetworkPolicy peers, got {text!r}", f"write '{example}'")
    return peers
