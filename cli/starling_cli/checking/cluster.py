"""Checks of a cluster: can Starling be installed (`--pre`), and is it installed and at work?"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from starling_cli.checking.finding import Finding, bad, good, note, verdict
from starling_cli.cluster.client import (
    CRD_NAME,
    GROUP,
    OPERATOR_SELECTOR,
    PLURAL,
    SCALE_PLURAL,
    VERSION,
    Cluster,
    ClusterError,
    Object,
)

MIN_MINOR = 29
"""Minor version of Kubernetes. CEL rules, Pod Security and all else that the children use are stable from 1.29 on."""
INSTALL = "helm install starling charts/starling -n starling-system --create-namespace"


def check_before(cluster: Cluster) -> Iterator[Finding]:
    """Checks before the installation."""
    for check in (check_version, check_install_rights, check_storage, check_nodes, check_pod_security):
        yield from _guarded(check, cluster)


def check_installed(cluster: Cluster) -> Iterator[Finding]:
    """Checks after the installation."""
    for check in (check_version, check_crd, check_operator, check_user_rights, check_storage, check_nodes, check_pod_security):
        yield from _guarded(check, cluster)


def _guarded(check: Callable[[Cluster], Iterable[Finding]], cluster: Cluster) -> Iterator[Finding]:
    """Runs a check. One without the right to look says so; the next ones go on."""
    try:
        yield from check(cluster)
    except ClusterError as error:
        title = check.__name__.removeprefix("check_").replace("_", " ")
        yield note("could not look", title, str(error)) if error.status == 403 else bad("cluster", title, str(error), error.fix)


def check_version(cluster: Cluster) -> Iterator[Finding]:
    version = cluster.version()
    minor = int("".join(filter(str.isdigit, str(version["minor"]))) or 0)
    yield verdict(
        "cluster",
        "Kubernetes",
        int(version["major"]) > 1 or minor >= MIN_MINOR,
        str(version["gitVersion"]),
        f"upgrade the cluster to 1.{MIN_MINOR} or newer",
    )


def check_crd(cluster: Cluster) -> Iterator[Finding]:
    try:
        found = _find_crd(cluster)
    except ClusterError as error:
        if error.status == 403:
            yield note("CRD", CRD_NAME, "not readable with these rights; listing works" if _can_list(cluster) else str(error))
            return
        raise
    if found is None:
        yield bad("CRD", CRD_NAME, "not installed", "`starling crds | kubectl apply --server-side -f -`")
        return
    conditions = {entry["type"]: entry["status"] for entry in found.get("status", {}).get("conditions", ())}
    if not cluster.knows(GROUP, VERSION, SCALE_PLURAL):
        yield bad("CRD", f"{SCALE_PLURAL}.{GROUP}", "not installed", "`starling crds | kubectl apply --server-side -f -`")
    yield verdict("CRD", CRD_NAME, conditions.get("Established") == "True", "established", "see `kubectl describe crd`")
    yield verdict(
        "CRD",
        "schema",
        differences(found) == [],
        ", ".join(differences(found)[:5]) or "that of this release",
        "`starling crds | kubectl apply --server-side -f -`",
    )


def _find_crd(cluster: Cluster) -> Object | None:
    crds = cluster.list_everywhere("apiextensions.k8s.io", "v1", "customresourcedefinitions")
    return next((crd for crd in crds if crd["metadata"]["name"] == CRD_NAME), None)


def _can_list(cluster: Cluster) -> bool:
    try:
        cluster.services()
    except ClusterError:
        return False
    return True


def differences(installed: Object) -> list[str]:
    """Returns the fields of spec and status that only one of this release's and the installed schema has."""
    from starling_crds.manifest import inferenceservice_crd

    ours, theirs = (_field_paths(crd) for crd in (inferenceservice_crd(), installed))
    return [f"lacks {path}" for path in sorted(ours - theirs)] + [f"has {path}" for path in sorted(theirs - ours)]


def _field_paths(crd: Object) -> set[str]:
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return {path for name in ("spec", "status") for path in _paths(name, schema["properties"].get(name, {}))}


def _paths(path: str, schema: dict[str, Any]) -> Iterator[str]:
    yield path
    for name, child in schema.get("properties", {}).items():
        yield from _paths(f"{path}.{name}", child)
    if isinstance(schema.get("items"), dict):
        yield from _paths(f"{path}[]", schema["items"])


def check_operator(cluster: Cluster) -> Iterator[Finding]:
    found = cluster.list_everywhere("apps", "v1", "deployments", OPERATOR_SELECTOR)
    if not found:
        yield bad("operator", "deployment", f"none with label {OPERATOR_SELECTOR}", INSTALL)
    for deployment in found:
        meta, status = deployment["metadata"], deployment.get("status", {})
        ready, wanted = int(status.get("readyReplicas", 0)), int(deployment["spec"].get("replicas", 1))
        where = f"{meta['namespace']}/{meta['name']}"
        image = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
        yield verdict(
            "operator",
            where,
            ready >= 1,
            f"{ready} of {wanted} pods are ready ({image})",
            f"kubectl -n {meta['namespace']} describe pods; kubectl -n {meta['namespace']} logs deployment/{meta['name']}",
        )


def check_user_rights(cluster: Cluster) -> Iterator[Finding]:
    verbs = {"get": PLURAL, "create": PLURAL, "patch": f"{PLURAL}/scale"}
    yield from (_right(cluster, "rights", verb, GROUP, resource, cluster.namespace) for verb, resource in verbs.items())


def check_install_rights(cluster: Cluster) -> Iterator[Finding]:
    wanted = {
        ("apiextensions.k8s.io", "customresourcedefinitions"): None,
        ("rbac.authorization.k8s.io", "clusterroles"): None,
        ("rbac.authorization.k8s.io", "clusterrolebindings"): None,
        ("", "namespaces"): None,
        ("apps", "deployments"): "starling-system",
    }
    yield from (_right(cluster, "rights to install", "create", g, r, namespace) for (g, r), namespace in wanted.items())


def _right(cluster: Cluster, section: str, verb: str, group: str, resource: str, namespace: str | None) -> Finding:
    allowed = cluster.is_allowed(verb, group, resource, namespace)
    where = f"in namespace {namespace}" if namespace else "in the whole cluster"
    return verdict(section, f"{verb} {resource}", allowed, where, "ask an administrator of the cluster for this right")


def check_storage(cluster: Cluster) -> Iterator[Finding]:
    marker = "storageclass.kubernetes.io/is-default-class"
    classes = cluster.list_everywhere("storage.k8s.io", "v1", "storageclasses")
    default = [c["metadata"]["name"] for c in classes if c["metadata"].get("annotations", {}).get(marker) == "true"]
    if default:
        yield good("storage", "default storage class", ", ".join(default))
    else:
        yield note("storage", "default storage class", "none; claims for weights must name a class or a volume")


def check_nodes(cluster: Cluster) -> Iterator[Finding]:
    from starling_cli.checking.nodes import node_findings

    yield from node_findings(cluster.nodes())


def check_pod_security(cluster: Cluster) -> Iterator[Finding]:
    """The agents' pods pass every level; only folders on the node (hostPath) do not."""
    level = cluster.namespace_labels().get("pod-security.kubernetes.io/enforce", "privileged (no label)")
    folders = "spec.model.cache.hostPath, spec.kvCache.tiers.filesystem.path and spec.endpoint.responseStore.path"
    limit = "" if level.startswith("privileged") else f"; {folders} are not possible here"
    yield good("pod security", f"namespace {cluster.namespace}", f"enforces {level}{limit}")
