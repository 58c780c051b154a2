"""Revisions: everything that a group's pods are made of, kept in a ControllerRevision and used as stored.

An upgraded operator that would render something else, or another default image, therefore rolls nothing: only a spec whose parts
that need new pods changed leads to a new revision.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starling_agent.contract.config import LayoutConfig
from starling_crds.v1alpha1.lifecycle import RolloutSpec
from starling_crds.v1alpha1.parallelism import Parallelism
from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan.config import agent_config
from starling_operator.plan.observed import Manifest, Observed, Service, Settings
from starling_operator.plan.podtemplate import agent_image, pod_template

FORMAT = 1
KEPT = 3
"""Revisions without groups that stay, so that going back to one makes the very same pods."""
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 7


@dataclass(frozen=True, slots=True)
class Revision:
    """data is what the ControllerRevision holds; number grows with each new one; uid is empty until it is stored."""

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
        """As agents report it."""
        return hashlib.sha256(self.config.encode()).hexdigest()

    @property
    def has_service(self) -> bool:
        """Its agents are told to prove the Service."""
        return json.loads(self.config)["endpoint"]["service_url"] is not None

    @property
    def layout(self) -> LayoutConfig:
        """As its agents are told."""
        return LayoutConfig.model_validate(json.loads(self.config)["layout"])

    @property
    def source(self) -> str:
        """Of the weights, as its agents are told."""
        return str(json.loads(self.config)["model"]["source"])

    @property
    def awaits_pin(self) -> bool:
        """Its agents wait until the commit of their weights is chosen. Those of earlier releases do not."""
        return json.loads(self.config)["model"].get("pin_file") is not None

    @property
    def template(self) -> Manifest:
        return dict(self.data["template"])


@dataclass(frozen=True, slots=True)
class Revisions:
    """All that are stored, oldest first, and the one that is wanted, which may be new."""

    stored: tuple[Revision, ...]
    target: Revision

    def find(self, identifier: str) -> Revision | None:
        """None for one that this release cannot read."""
        return next((known for known in (self.target, *self.stored) if known.id == identifier), None)


def read_revisions(observed: Observed, spec: InferenceServiceSpec) -> Revisions:
    stored = stored_revisions(observed)
    return Revisions(stored, target_revision(observed.service, spec, observed.settings, stored))


def stored_revisions(observed: Observed) -> tuple[Revision, ...]:
    """Oldest first. Those of a format that this release cannot read are left out, and so never touched."""
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
    """The stored revision of this spec, or a new one. Raises ValueError naming the field that cannot be rendered."""
    wanted = spec_hash(spec)
    for revision in reversed(stored):
        if revision.spec_hash == wanted:
            return revision
    number = 1 + max((revision.number for revision in stored), default=0)
    # The id is part of what it names (labels, the ConfigMap's name), so it is taken from a rendering without it.
    identifier = _identifier(_render(service, spec, settings, ""))
    return Revision(identifier, number, _render(service, spec, settings, identifier))


def spec_hash(spec: InferenceServiceSpec) -> str:
    """Of the parts that need new pods. Fields at their default are left out: a later release's new fields change nothing."""
    fixed = spec.model_copy(
        update={
            "replicas": 1,
            "parallelism": _fixed(spec.parallelism),
            "rollout": RolloutSpec(),
            "recovery": spec.recovery.model_copy(
                update={name: type(spec.recovery).model_fields[name].default for name in ("restart_budget", "window_seconds")}
            ),
            "suspend": False,
            "class_name": None,
            "endpoint": spec.endpoint.model_copy(update={"port": type(spec.endpoint).model_fields["port"].default, "route": None}),
        }
    )
    return _digest(fixed.model_dump(mode="json", by_alias=True, exclude_defaults=True))[:16]


def _fixed(split: Parallelism) -> Parallelism:
    """With elastic bounds the size is no part of a revision, only its unit; without, the smallest is as if it were left out."""
    if split.elastic is not None:
        low = split.elastic.min
        return split.model_copy(update={"data": low} if split.expert is None else {"expert": low})
    smallest = {"data": 1, "expert": split.tensor}
    return split.model_copy(update={name: None for name, size in smallest.items() if getattr(split, name) == size})


def outdated(revisions: Revisions, in_use: frozenset[str]) -> tuple[Revision, ...]:
    """What may go: neither wanted nor in use, nor among the last few of the others."""
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
