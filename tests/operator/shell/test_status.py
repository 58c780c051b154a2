"""Writes of the status against a real API server: those that begin something must not pass what was not seen."""

from pathlib import Path

import pytest
from kubernetes.aio import config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from starling_crds.v1alpha1.status import InferenceServiceStatus
from starling_operator.cache import Cache
from starling_operator.kinds import INFERENCE_SERVICE
from starling_operator.kube import Kube
from starling_operator.observe import read_service
from starling_operator.status import write_status

from tests.operator.shell.cluster import Cluster, manifest


@pytest.mark.parametrize(("over_seen", "written"), [(True, False), (False, True)])
async def test_a_write_over_another_version(cluster: Cluster, apiserver: Path, over_seen: bool, written: bool) -> None:
    settings = Configuration()
    await config.load_kube_config(config_file=str(apiserver), client_configuration=settings)
    kube, cache = Kube(ApiClient(settings), lambda: 10.0), Cache()
    try:
        body = await cluster.apply(manifest())
        cache.put(INFERENCE_SERVICE, body)
        service = read_service(body)
        await cluster.edit("chat", {"replicas": 2})
        status = InferenceServiceStatus(replicas=7)
        assert await write_status(kube, cache, service, status, over_seen=over_seen) is written
        assert ("status" in await cluster.service("chat")) is written
        fresh = read_service(await cluster.service("chat"))
        assert await write_status(kube, cache, fresh, status.model_copy(update={"replicas": 8}), over_seen=True)
        assert (await cluster.service("chat"))["status"]["replicas"] == 8
    finally:
        await kube.close()
