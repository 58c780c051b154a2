"""/healthz of the real process turns bad when work that is due is not done, and is good otherwise."""

import signal

from tests.operator.shell.cluster import CHILD_PATHS, Cluster, manifest
from tests.operator.shell.conftest import StartOperator
from tests.operator.shell.kubelet import Kubelet
from tests.operator.shell.process import OperatorProcess
from tests.operator.shell.proxy import Proxy
from tests.waiting import until

STUCK_SOON = "starling_operator.operator:STUCK_SECONDS=2"
AUDITED_OFTEN = "starling_operator.watch.audit:PERIOD=1"
SHORT_LEASE = tuple(f"starling_operator.cluster.lease:{each}" for each in ("DURATION=4", "RENEW=0.5", "MARGIN=1"))


async def _turns_bad(operator: OperatorProcess, words: str) -> None:
    async def is_bad() -> bool:
        status, text = await operator.get("/healthz")
        return status == 503 and words in text

    await until(is_bad, f"/healthz to say {words!r}; see {operator.log}", 90, lambda: operator.get("/healthz"))
    assert (await operator.get("/readyz"))[0] == 503


async def test_a_reconcile_that_hangs(cluster: Cluster, start_operator: StartOperator) -> None:
    operator = await start_operator(altered=(STUCK_SOON, "a_reconcile_hangs"))
    assert (await operator.get("/healthz"))[0] == 200
    await cluster.apply(manifest())
    await _turns_bad(operator, f"the reconcile of {cluster.namespace}/chat has been running for")


async def test_a_loop_that_hangs_answers_no_probe(cluster: Cluster, start_operator: StartOperator) -> None:
    operator = await start_operator(altered=("the_loop_hangs",))
    await cluster.apply(manifest())

    async def is_silent() -> bool:
        return (await operator.get("/healthz"))[0] == 0

    await until(is_silent, "/healthz to be silent for as long as a kubelet waits", 90)


async def test_a_process_that_is_stopped_answers_no_probe_and_ends_when_it_goes_on(start_operator: StartOperator) -> None:
    """Another operator may have taken over by then."""
    operator = await start_operator(altered=SHORT_LEASE)

    async def leads() -> bool:
        return await operator.metric("starling_operator_leader") == 1

    await until(leads, "it to lead")
    operator.send(signal.SIGSTOP)
    # A kubelet's patience is longer than this Lease.
    assert (await operator.get("/healthz"))[0] == 0
    operator.send(signal.SIGCONT)
    assert await operator.ended() == 1
    assert "LeaseLost" in operator.log.read_text()


async def test_a_watch_that_is_silently_dead_and_one_that_recovers(
    cluster: Cluster, kubelet: Kubelet, start_operator: StartOperator, proxy: Proxy
) -> None:
    del kubelet  # it has to run
    operator = await start_operator(altered=(AUDITED_OFTEN,))
    await cluster.apply(manifest())
    await cluster.ready("chat")
    await operator.settled()
    proxy.mute = "/services"
    await cluster.merge(f"{CHILD_PATHS['Service'].format(cluster.namespace)}/chat", {"metadata": {"labels": {"mine": "x"}}})
    await _turns_bad(operator, "the watch of services has shown nothing of 1 changes")
    proxy.mute = ""

    async def is_good() -> bool:
        return (await operator.get("/healthz"))[0] == 200

    await until(is_good, "/healthz to be good again")
