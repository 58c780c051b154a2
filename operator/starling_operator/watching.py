"""kopf, held to watching: nothing of it is stored on any object, and it posts nothing."""

from typing import Any

import kopf

from starling_operator.kinds import Kind


class NoProgress(kopf.ProgressStorage):
    """Handlers of events have no progress to remember."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Nothing is stored."""

    def purge(self, **_: Any) -> None:
        """Nothing was stored."""

    def touch(self, **_: Any) -> None:
        """Objects are not touched."""

    def clear(self, *, essence: Any) -> Any:
        return essence


class NoDiffBase(kopf.DiffBaseStorage):
    """Nothing is compared; the usual storage copies every object at every event to be able to."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Nothing is stored."""


def configure_kopf(settings: kopf.OperatorSettings, kinds: tuple[Kind, ...]) -> None:
    """The API server filters by label. No list of namespaces or CRDs is watched: that would need rights on them."""
    settings.persistence.progress_storage = NoProgress()
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.watching.chunk_size = 500
    for kind in kinds:
        if kind.selector:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = kind.selector
