"""Masks of steps in flight, filled in from the constraints of their requests."""

import logging
from collections.abc import Iterable

from starling_engine.request_state import RequestState
from starling_engine.scheduler.step_builder import StepBuilder
from starling_engine.step import StepMasks

logger = logging.getLogger("starling.scheduler")


def take_due_masks(in_flight: Iterable[StepBuilder]) -> list[StepMasks]:
    """Returns the masks that are due: of steps whose masked requests are in no earlier step, each step's once."""
    due: list[StepMasks] = []
    earlier: set[RequestState] = set()
    for builder in in_flight:
        if builder.masked and earlier.isdisjoint(builder.requests[row] for row in builder.masked):
            due.append(_fill(builder))
            builder.masked = []
        earlier.update(builder.requests)
    return due


def _fill(builder: StepBuilder) -> StepMasks:
    """Fills in the masks of a step's rows. A row whose constraint fails, or whose request has gone, has none."""
    filled: list[tuple[int, bytearray]] = []
    all_drafts = builder.drafts_by_row()
    for row in builder.masked:
        request, drafts = builder.requests[row], all_drafts[row]
        if request.constraint is None or request.run != builder.runs[row]:
            continue
        bits = bytearray(4 * request.constraint.words * (1 + len(drafts)))
        try:
            request.constraint.fill(drafts, memoryview(bits))
        except ValueError as error:
            logger.info("%s has no mask for step %d: %s", request.record.id, builder.step_id, error)
            continue
        filled.append((row, bits))
    return StepMasks(builder.step_id, [row for row, _ in filled], b"".join(bits for _, bits in filled))
