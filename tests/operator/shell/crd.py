"""The CRD, installed as a user does it."""

from starling_crds.manifest import inferenceservice_crd

from tests.operator.shell.cluster import Cluster, until

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


async def install_crd(cluster: Cluster) -> None:
    """Leaves the one that is there: a session's tests share an API server."""
    listed = await cluster.call("GET", CRDS)
    if not any(item["spec"]["group"] == "serving.starling.dev" for item in listed["items"]):
        await cluster.apply(inferenceservice_crd(), CRDS)

    async def is_established() -> bool:
        found = await cluster.call("GET", f"{CRDS}/inferenceservices.serving.starling.dev")
        conditions = found.get("status", {}).get("conditions") or []
        return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)

    await until(is_established, "the CRD to be established")
