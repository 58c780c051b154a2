"""Whether the nodes of a group can serve without each other."""

import json

from starling_agent.contract.config import LayoutConfig

from starling_operator.plan import names
from starling_operator.plan.observed import Observed


def nodes_are_tied(observed: Observed, revision: str) -> bool:
    """False where each node holds whole data parallel ranks that know nothing of each other: one may go, and the others serve.

    A revision that cannot be read is taken for one whose ranks step together.
    """
    live = observed.children.get(("ConfigMap", names.revision_object(observed.service.name, revision)))
    try:
        config = json.loads((live or {})["data"]["agent.json"])
        layout = LayoutConfig.model_validate(config["layout"])
    except (KeyError, TypeError, ValueError):
        return True
    several = layout.data > 1 or layout.elastic is not None
    experts = several and bool(config.get("engine", {}).get("enable_expert_parallel"))
    return layout.tensor * layout.pipeline > layout.per_node or experts
