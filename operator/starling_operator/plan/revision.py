"""Revisions: everything that a group's pods are made of, stored in a ControllerRevision and used as stored.

So an upgraded operator replaces no pod, though it would render another template or has another default image. Only a change of
fields that need new pods makes a new revision.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starling_agent.contract.config import LayoutConfig
from starling_crds.v1alpha1.lifecycle import RolloutSpec
from starling_crds.v1alpha1.parallelism import Parallelism
from starling_crds.v1alpha1.router import RouterSpec, TenantSpec
from starling_crds.v1alpha1.scaling import ScalingSpec
from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan.config import agent_config, has_tenants
from starling_operator.plan.observed import Manifest, Observed, Service, Settings
from starling_operator.plan.podtemplate import agent_image, pod_template

FORMAT = 1
KEPT = 3
"""Unused revisions that are kept: going back to one of them makes the very same pods."""
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 7
_SOME_TENANTS = RouterSpec(tenants=[TenantSpec(name="any")])
"""Stands for any tenants: whether there are some says whether agents begin closed, and who they are is the routers' alone."""


@dataclass(frozen=True, slots=True)
class Revision:
    """`data`: content of the ControllerRevision; `number` grows with each new one; `uid`: "" until it is stored."""

    id: str
    number: int
    data: dict[str, Any]
    uid: str = ""

    @property
    def spec_hash(self) -> str:
        return str(self.data["specHash"])

    @property
    def config(self) -> str:
        """The text of agent.json."""
        return str(self.data["config"])

    @property
    def config_hash(self) -> str:
        """Digest of agent.json, as agents report it."""
        return hashlib.sha256(self.config.encode()).hexdigest()

    @property
    def has_service(self) -> bool:
        """True if its agents get a token through the Service before they are ready."""
        return json.loads(self.config)["endpoint"]["service_url"] is not None

    @property
    def layout(self) -> LayoutConfig:
        """Layout in agent.json."""
        return LayoutConfig.model_validate(json.loads(self.config)["layout"])

    @property
    def source(self) -> str:
        """Source of the weights in agent.json."""
        return str(json.loads(self.config)["model"]["source"])

    @property
    def awaits_pinned_commit(self) -> bool:
        """True if its agents wait until their weights are pinned to a commit. Those of earlier releases do not."""
        return json.loads(self.config)["model"].get("pin_file") is not None

    @property
    def template(self) -> Manifest:
        return dict(self.data["template"])


@dataclass(frozen=True, slots=True)
class Revisions:
    """All stored revisions, oldest first, and the target, which may be new."""

    stored: tuple[Revision, ...]
    target: Revision

    def find(self, identifier: str) -> Revision | None:
        """Returns None for a revision that this release cannot read."""
        return next((known for known in (self.target, *self.stored) if known.id == identifier), None)


def read_revisions(observed: Observed, spec: InferenceServiceSpec) -> Revisions:
    stored = stored_revisions(observed)
    return Revisions(stored, target_revision(observed.service, spec, observed.settings, stored))


def stored_revisions(observed: Observed) -> tuple[Revision, ...]:
    """Returns them oldest first. Those of a format that this release cannot read are left out, and so never changed."""
    found = [
        Revision(
            id=name.removeprefix(f"{observed.service.name}-"),
            number=int(live.get("revision", 0)),
            data=live["data"],
            uid=live["metadata"].get("uid", ""),
        )
        for (kind, name), live in observed.children.items()
        if kind == "ControllerRevision" and (live.get("data") or {}).get("format") == FORMAT
    ]
    return tuple(sorted(found, key=lambda revision: (revision.number, revision.id)))


def target_revision(service: Service, spec: InferenceServiceSpec, settings: Settings, stored: Sequence[Revision]) -> Revision:
    """Returns the stored revision of this spec, or a new one. Raises ValueError naming the field that cannot be rendered."""
    wanted = spec_hash(spec)
    for revision in reversed(stored):
        if revision.spec_hash == wanted:
            return revision
    number = 1 + max((revision.number for revision in stored), default=0)
    # Labels and the ConfigMap's name contain the id, so it is the digest of a rendering without it.
    identifier = _identifier(_render(service, spec, settings, ""))
    return Revision(identifier, number, _render(service, spec, settings, identifier))


def spec_hash(spec: InferenceServiceSpec) -> str:
    """Digest of the fields that need new pods, without those at their default: so a later release's new fields change nothing."""
    fixed = spec.model_copy(
        update={
            "replicas": 1,
            "parallelism": _fixed(spec.parallelism),
            "rollout": RolloutSpec(),
            "recovery": spec.recovery.model_copy(
                update={name: type(spec.recovery).model_fields[name].default for name in ("restart_budget", "window_seconds")}
            ),
            "suspend": False,
            "router": _SOME_TENANTS if has_tenants(spec) else None,
            "scaling": ScalingSpec(),
            "class_name": None,
            "endpoint": spec.endpoint.model_copy(update={"port": type(spec.endpoint).model_fields["port"].default, "route": None}),
        }
    )
    return _digest(fixed.model_dump(mode="json", by_alias=True, exclude_defaults=True))[:16]


def _fixed(split: Parallelism) -> Parallelism:
    """Leaves an elastic size out, but for its unit. Without elastic bounds the smallest size counts as not given."""
    if split.elastic is not None:
        low = split.elastic.min
        return split.model_copy(update={"data": low} if split.expert is None else {"expert": low})
    smallest = {"data": 1, "expert": split.tensor}
    return split.model_copy(update={name: None for name, size in smallest.items() if getattr(split, name) == size})


def outdated(revisions: Revisions, in_use: frozenset[str]) -> tuple[Revision, ...]:
    """Returns revisions to delete: neither target nor in use, nor among the last `KEPT` of the others."""
    kept = in_use | {revisions.target.id}
    idle = [revision for revision in revisions.stored if revision.id not in kept]
    return tuple(idle[: max(0, len(idle) - KEPT)])


def _render(service: Service, spec: InferenceServiceSpec, settings: Settings, identifier: str) -> dict[str, Any]:
    config = agent_config(service, spec, settings, identifier)
    return {
        "format": FORMAT,
        "specHash": spec_hash(spec),
        "image": agent_image(spec, settings),
        "template": pod_template(service, spec, settings, identifier),
        "config": config.model_dump_json(indent=2) + "\n",
    }


def _identifier(data: dict[str, Any]) -> str:
    number = int(_digest(data), 16)
    letters = []
    for _ in range(_ID_LENGTH):
        number, rest = divmod(number, len(_ALPHABET))
        letters.append(_ALPHABET[rest])
    return "".join(letters)


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
