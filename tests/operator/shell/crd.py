"""The CRDs, installed as a user does it."""

from starling_crds.manifest import crds

from tests.operator.shell.cluster import Cluster, Manifest
from tests.waiting import until

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


async def install_crd(cluster: Cluster) -> None:
    """Installs those that are missing: a session's tests share an API server."""
    listed = {item["metadata"]["name"] for item in (await cluster.call("GET", CRDS))["items"]}
    wanted = {crd["metadata"]["name"]: crd for crd in crds().values()}
    for name in wanted.keys() - listed:
        await cluster.apply(wanted[name], CRDS)

    async def are_established() -> bool:
        found = [await cluster.call("GET", f"{CRDS}/{name}") for name in wanted]
        return all(_is_established(crd) for crd in found)

    await until(are_established, "the CRDs to be established")


def _is_established(crd: Manifest) -> bool:
    conditions = crd.get("status", {}).get("conditions") or []
    return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)
