"""Refused specs, and the messages that say why."""

from typing import Any

import pytest
from starling_crds.v1alpha1.engine import KVCacheSpec
from starling_crds.v1alpha1.model import ModelSpec
from starling_crds.v1alpha1.parallelism import Accelerators, Parallelism
from starling_crds.v1alpha1.spec import InferenceServiceSpec
from starling_operator.plan.plan import plan
from starling_operator.plan.refusals import check_spec, not_in_this_release

from tests.operator.plan.building import conditions_of, make_observed, make_service, make_spec, message_of
from tests.operator.plan.world import World


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"accelerators": {"type": "amd.com/gpu"}},
            "spec.accelerators.type: this release runs on cpu and nvidia.com/gpu, got amd.com/gpu",
        ),
        ({"model": {"trustRemoteCode": True}}, "spec.model.trustRemoteCode: "),
    ],
)
def test_what_the_engine_cannot_do_yet(changes: dict[str, Any], message: str) -> None:
    decision = plan(make_observed(make_spec(changes)))
    assert conditions_of(decision.status)["Stalled"] == ("True", "Unsupported")
    assert conditions_of(decision.status)["Ready"] == ("False", "Unsupported")
    assert message_of(decision.status, "Ready").startswith(message)
    assert decision.create == decision.apply == decision.delete == ()
    assert [event.reason for event in decision.events] == ["Refused"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parallelism": {"tensor": 1, "pipeline": 1, "data": 1}},
        {"parallelism": {"tensor": 2}},
        {"parallelism": {"pipeline": 2}},
        {"parallelism": {"tensor": 2, "pipeline": 2}, "accelerators": {"perNode": 2}},
        {"parallelism": {"tensor": 2, "pipeline": 3}, "accelerators": {"perNode": 3}},
        {"parallelism": {"data": 2, "tensor": 2}},
        {"parallelism": {"data": 4}},
        {"parallelism": {"data": 4}, "accelerators": {"perNode": 2}},
        {"parallelism": {"data": 2, "tensor": 2}, "accelerators": {"perNode": 2}},
        {"parallelism": {"data": 2, "tensor": 2}, "accelerators": {"perNode": 4}},
        {"parallelism": {"expert": 1}},
        {"parallelism": {"expert": 2}},
        {"parallelism": {"expert": 4, "tensor": 2}},
        {"parallelism": {"expert": 4, "elastic": {"min": 1, "max": 8}}},
        {"accelerators": {"type": "cpu", "perNode": 1}},
        {"parallelism": {"tensor": 2}, "accelerators": {"perNode": 2}},
        {"parallelism": {"tensor": 2, "pipeline": 2}, "accelerators": {"perNode": 4}},
        {"kvCache": {"tiers": {}}},
        {"kvCache": {"tiers": {"cpu": {"bytes": "1Gi"}, "filesystem": {"bytes": "1Gi", "path": "/kv"}}, "store": "mooncake://s:1"}},
        {"model": {"trustRemoteCode": False}},
    ],
)
def test_what_the_engine_can_do(changes: dict[str, Any]) -> None:
    assert list(not_in_this_release(make_spec(changes))) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"blok_size": 1},
            "engine.extraArgs.blok_size: the engine has no such argument; possible are async_scheduling, ",
        ),
        ({"--seed": 1}, "engine.extraArgs.--seed: the engine has no such argument"),
        ({"max-num-seqs": 1}, "engine.extraArgs.max-num-seqs: the engine has no such argument"),
        ({"show_progress": True}, "engine.extraArgs.show_progress: the engine has no such argument"),
        ({"model": "x"}, "engine.extraArgs.model: is set by spec.model.source; use that"),
        ({"revision": "x"}, "engine.extraArgs.revision: is set by spec.model.source"),
        ({"dtype": "float32"}, "engine.extraArgs.dtype: is set by spec.model.dtype"),
        ({"device": "cpu"}, "engine.extraArgs.device: is set by spec.accelerators.type"),
        ({"max_model_len": 1}, "engine.extraArgs.max_model_len: is set by spec.model.maxLength"),
        ({"max_num_seqs": 1}, "engine.extraArgs.max_num_seqs: is set by spec.engine.maxSequences"),
        ({"block_size": 16}, "engine.extraArgs.block_size: is set by spec.engine.blockSize"),
        ({"kv_cache_memory_bytes": 1}, "engine.extraArgs.kv_cache_memory_bytes: is set by spec.engine.kvMemory"),
        ({"gpu_memory_utilization": 0.5}, "engine.extraArgs.gpu_memory_utilization: is set by spec.engine.memoryFraction"),
        ({"enable_prefix_caching": True}, "engine.extraArgs.enable_prefix_caching: is set by spec.engine.prefixCaching"),
        ({"scheduling_policy": "fcfs"}, "engine.extraArgs.scheduling_policy: is set by spec.engine.schedulingPolicy"),
        ({"progress_timeout": 3.0}, "engine.extraArgs.progress_timeout: is set by spec.recovery.progressTimeoutSeconds"),
        ({"tensor_parallel_size": 1}, "engine.extraArgs.tensor_parallel_size: is set by spec.parallelism.tensor"),
        ({"data_parallel_size": 1}, "engine.extraArgs.data_parallel_size: is set by spec.parallelism.data"),
        ({"kv_cpu_bytes": 1}, "engine.extraArgs.kv_cpu_bytes: is set by spec.kvCache.tiers.cpu.bytes"),
        ({"kv_fs_path": "/kv"}, "engine.extraArgs.kv_fs_path: is set by spec.kvCache.tiers.filesystem.path"),
        ({"kv_fs_bytes": 1}, "engine.extraArgs.kv_fs_bytes: is set by spec.kvCache.tiers.filesystem.bytes"),
        ({"kv_store": "mooncake://s:1"}, "engine.extraArgs.kv_store: is set by spec.kvCache.store"),
        ({"preempt": "swap"}, "engine.extraArgs.preempt: "),
        ({"kv_cpu_policy": "fifo"}, "engine.extraArgs.kv_cpu_policy: "),
        ({"kv_events": "5557"}, "engine.extraArgs.kv_events: must be tcp://"),
        ({"num_threads": 0}, "engine.extraArgs.num_threads: must be at least 1, got 0"),
        ({"num_threads": "four"}, "engine.extraArgs.num_threads: "),
        ({"num_threads": 1.5}, "engine.extraArgs.num_threads: "),
        ({"num_threads": True}, "engine.extraArgs.num_threads: "),
        ({"seed": "x"}, "engine.extraArgs.seed: "),
        ({"seed": [1]}, "engine.extraArgs.seed: "),
        ({"load_format": "pickle"}, "engine.extraArgs.load_format: "),
        ({"async_scheduling": "yes"}, "engine.extraArgs.async_scheduling: "),
        ({"tokenizer": 7}, "engine.extraArgs.tokenizer: "),
        ({"attention_backend": None}, "engine.extraArgs.attention_backend: "),
    ],
)
def test_engine_arguments_that_are_unknown_set_twice_or_wrong(arguments: dict[str, Any], message: str) -> None:
    engine = make_spec().engine.model_copy(update={"extra_args": arguments})
    spec = make_spec().model_copy(update={"engine": engine})
    decision = plan(make_observed(spec))
    assert conditions_of(decision.status)["Stalled"] == ("True", "InvalidSpec")
    assert message_of(decision.status, "Stalled").startswith(f"spec.{message}")


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_threads": 2},
        {"num_threads": None},
        {"seed": 7},
        {"load_format": "dummy"},
        {"async_scheduling": True},
        {"tokenizer": "org/other"},
        {"attention_backend": "torch_paged"},
    ],
)
def test_engine_arguments_that_no_field_sets(arguments: dict[str, Any]) -> None:
    check_spec(make_spec({"engine": {"extraArgs": arguments}}))


LIMIT = {"spec": {"containers": [{"name": "agent", "resources": {"limits": {"memory": "2Gi"}}}]}}


def stored(**fields: Any) -> InferenceServiceSpec:
    """Makes a spec that an older API server may have let through."""
    return make_spec().model_copy(update=fields)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            stored(model=ModelSpec.model_construct(**dict(make_spec().model) | {"source": "s3://x"})),
            "spec.model.source: must be hf://",
        ),
        (
            stored(engine=make_spec().engine.model_copy(update={"kv_memory": "lots"})),
            "spec.engine.kvMemory: 'lots' is not a size",
        ),
        (
            stored(engine=make_spec().engine.model_copy(update={"max_batched_tokens": 8, "max_sequences": 16})),
            "spec.engine.maxBatchedTokens: must be at least max_num_seqs",
        ),
        (stored(engine=make_spec().engine.model_copy(update={"block_size": 7})), "spec.engine.blockSize: must be one of 8, 16, 32"),
        (stored(model=make_spec().model.model_copy(update={"dtype": "int4"})), "spec.model.dtype: must be one of"),
        (
            stored(parallelism=Parallelism.model_construct(tensor=1, pipeline=1, data=2, expert=2, elastic=None)),
            "spec.parallelism: ",
        ),
        (stored(accelerators=Accelerators.model_construct(type="cpu", per_node=2)), "spec.accelerators.perNode: "),
        (stored(template={"spec": {"containers": {}}}), "spec.template.spec.containers: must be a list"),
        (stored(template={"spec": {"containers": None}}), "spec.template.spec.containers: the container named agent"),
        (stored(template={"spek": {}}), "spec.template.spek: "),
        (
            stored(template={"spec": {"containers": [{"name": "agent", "resources": {"limits": {"memory": "much"}}}]}}),
            "spec.template.spec.containers[agent].resources.limits.memory: 'much' is not a size",
        ),
        *(
            (stored(template={"spec": part}), f"spec.template.spec.{field}: must be a {kind}")
            for part, field, kind in (
                ({"initContainers": "x"}, "initContainers", "list"),
                ({"initContainers": 7}, "initContainers", "list"),
                ({"initContainers": {"a": "b"}}, "initContainers", "list"),
                ({"initContainers": [{"name": "i", "resources": ["a"]}]}, "initContainers[i].resources", "map"),
                ({"containers": [{"name": "side", "resources": True}]}, "containers[side].resources", "map"),
                ({"containers": [{"name": "side", "resources": {"limits": "x"}}]}, "containers[side].resources.limits", "map"),
                ({"containers": [{"name": "agent", "resources": {"requests": 7}}]}, "containers[agent].resources.requests", "map"),
            )
        ),
        (
            stored(template={"spec": {"containers": [{"name": "agent", "resources": {"limits": ["x"]}}]}}),
            "spec.template.spec.containers[agent].resources.limits: must be a map",
        ),
    ],
)
def test_a_spec_that_contradicts_itself(spec: InferenceServiceSpec, message: str) -> None:
    decision = plan(make_observed(spec))
    assert conditions_of(decision.status)["Stalled"] == ("True", "InvalidSpec")
    assert message_of(decision.status, "Ready").startswith(message)
    assert decision.create == decision.apply == decision.delete == ()


def test_a_store_s_options_are_the_engine_s_to_know() -> None:
    store = make_spec({"kvCache": {"store": "mooncake://s:50051?segmnt=4GiB"}})
    assert message_of(plan(make_observed(store)).status, "Ready").startswith("spec.kvCache.store: segmnt is not known")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"template": LIMIT}, None),
        ({"kvCache": {"tiers": {"cpu": {"bytes": "2Gi"}}}}, None),
        (
            {"kvCache": {"tiers": {"cpu": {"bytes": "2Gi"}}}, "template": LIMIT},
            "2147483648 bytes of kvCache.tiers.cpu.bytes for each",
        ),
        ({"kvCache": {"tiers": {"cpu": {"bytes": "1Gi"}}}, "template": LIMIT}, None),
        (
            {"kvCache": {"tiers": {"cpu": {"bytes": "1Gi"}}}, "engine": {"kvMemory": "1Gi"}, "template": LIMIT},
            "1073741824 bytes of kvCache.tiers.cpu.bytes and 1073741824 bytes of engine.kvMemory for each",
        ),
        (
            {
                "kvCache": {"tiers": {"cpu": {"bytes": "1Gi"}}},
                "parallelism": {"tensor": 2},
                "accelerators": {"perNode": 2},
                "template": LIMIT,
            },
            "for each of the pod's 2 ranks leave nothing",
        ),
        (
            {"kvCache": {"tiers": {"cpu": {"bytes": "1Gi"}}, "store": "mooncake://s:1?segment=768MiB"}, "template": LIMIT},
            "and 1073741824 bytes of kvCache.store for each",
        ),
        (
            {"kvCache": {"tiers": {"cpu": {"bytes": "1Gi"}}, "store": "mooncake://s:1?buffer=1GiB"}, "template": LIMIT},
            "and 1073741824 bytes of kvCache.store for each",
        ),
    ],
)
def test_what_is_kept_in_memory_is_of_the_pod_s(changes: dict[str, Any], words: str | None) -> None:
    status = plan(make_observed(make_spec(changes))).status
    message = message_of(status, "Ready")
    assert (conditions_of(status)["Stalled"] == ("True", "InvalidSpec")) == (words is not None), message
    if words is not None:
        assert message.startswith("spec.kvCache.tiers.cpu.bytes: ") and words in message
        assert "set template.spec.containers[agent].resources.limits.memory above 2147483648" in message


FILES = {"tiers": {"filesystem": {"bytes": "9Gi", "claim": "c"}}}
STORE = {"store": "mooncake://s:1?segment=512MiB&buffer=512MiB"}
GPU = {"type": "nvidia.com/gpu", "perNode": 1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kvCache": FILES, "template": LIMIT}, None),
        ({"kvCache": STORE}, None),
        ({"kvCache": STORE, "template": LIMIT}, "2147483648 bytes of kvCache.store for each"),
        (
            {"kvCache": FILES | STORE, "template": LIMIT},
            "1073741824 bytes of kvCache.tiers.filesystem and 1073741824 bytes of kvCache.store for each",
        ),
        ({"kvCache": FILES | STORE, "engine": {"kvMemory": "256Mi"}, "template": LIMIT}, None),
        (
            {"kvCache": FILES | STORE, "engine": {"kvMemory": "512Mi"}, "template": LIMIT},
            "1073741824 bytes of kvCache.store and 536870912 bytes of engine.kvMemory for each",
        ),
        ({"kvCache": FILES | STORE, "engine": {"kvMemory": "9Gi"}, "accelerators": GPU, "template": LIMIT}, "above 2147483648,"),
        ({"kvCache": FILES | STORE, "engine": {"kvMemory": "1023Mi"}, "accelerators": GPU, "template": LIMIT}, None),
    ],
)
def test_what_files_and_a_store_pass_through_is_of_the_pod_s(changes: dict[str, Any], words: str | None) -> None:
    """Both share staging buffers where there is no CPU tier: up to 1 GiB, and no more than the device's cache."""
    message = message_of(plan(make_observed(make_spec(changes))).status, "Ready")
    assert ("leave nothing of its memory limit" in message) == (words is not None), message
    assert words is None or (words in message and message.endswith("with a small kvCache.tiers.cpu"))


def test_a_spec_that_cannot_be_read() -> None:
    service = make_service(None, spec_error="spec.replicas: must be a number, got 'x'", generation=4)
    decision = plan(make_observed(service=service))
    assert message_of(decision.status, "Ready") == "spec.replicas: must be a number, got 'x'"
    assert conditions_of(decision.status)["Stalled"] == ("True", "InvalidSpec")
    assert decision.status.observed_generation == 4


@pytest.mark.parametrize(
    "changes",
    [{"model": {"trustRemoteCode": True}}, {"engine": {"extraArgs": {"nonsense": 1}}}],
)
def test_what_runs_stays_as_it_is(changes: dict[str, Any]) -> None:
    world = World({"replicas": 2})
    world.settle()
    before, url = dict(world.children), world.status.url
    world.edit(changes)
    observed = world.observe()
    decision = plan(observed)
    assert decision.create == decision.delete == ()
    [budget] = decision.apply
    assert before["PodDisruptionBudget", "chat"]["spec"] == budget["spec"]
    assert conditions_of(decision.status)["Available"] == ("True", "GroupsServe")
    assert conditions_of(decision.status)["Ready"][0] == "False"
    assert decision.status.ready_replicas == decision.status.replicas == 2
    assert (decision.status.url, decision.status.revision) == (url, world.status.revision)
    assert [group.ready for group in decision.status.groups] == [True, True]
    assert decision.requeue_after is None
    assert world.children == before


def test_a_refusal_is_an_event_once_and_another_one_again() -> None:
    world = World({"model": {"trustRemoteCode": True}})
    first = plan(world.observe())
    world.status = first.status
    assert [event.reason for event in first.events] == ["Refused"]
    assert plan(world.observe()).events == ()
    world.edit({"model": {"trustRemoteCode": False}, "accelerators": {"type": "amd.com/gpu"}})
    assert [event.reason for event in plan(world.observe()).events] == ["Refused"]


def test_offload_tiers_are_optional() -> None:
    assert KVCacheSpec().tiers.cpu is None
