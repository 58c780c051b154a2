"""Masks of steps in flight, filled in from the constraints of their requests."""

import logging
from collections.abc import Iterable
from itertools import compress

from starling_engine.constraint import MaskRow
from starling_engine.request_state import RequestState
from starling_engine.scheduler.step_builder import StepBuilder
from starling_engine.step import StepMasks

logger = logging.getLogger("starling.scheduler")


def take_due_masks(in_flight: Iterable[StepBuilder]) -> list[StepMasks]:
    """Returns the masks that are due, each step's once: of steps whose masked requests sample in no earlier step.

    A rank waits for masks in the order of steps, so none is due before those of an earlier step.
    """
    due: list[StepMasks] = []
    earlier: set[RequestState] = set()
    for builder in in_flight:
        if builder.masked:
            if not earlier.isdisjoint(builder.requests[row] for row in builder.masked):
                break
            due.append(_masks(builder))
            builder.masked = []
        earlier.update(compress(builder.requests, builder.sample))
    return due


def _masks(builder: StepBuilder) -> StepMasks:
    """Fills in the masks of a step's rows. A row whose constraint fails, or has failed, or whose request has gone, has none."""
    rows: dict[int, MaskRow] = {}
    all_drafts, count = builder.drafts_by_row(), 0
    for row in builder.masked:
        request = builder.requests[row]
        if request.constraint is None or request.run != builder.runs[row]:
            continue
        if request.constraint.error is not None:
            _log_no_mask(builder, row, request.constraint.error)
            continue
        rows[row] = MaskRow(request.constraint, all_drafts[row], count)
        count += 1 + len(all_drafts[row])
    if not rows:
        return StepMasks(builder.step_id, [], b"")
    constraint = next(iter(rows.values())).constraint
    size = 4 * constraint.words
    bits = bytearray(b"\xff") * (size * count)
    constraint.fill(tuple(rows.values()), bits)
    filled = {row: masked for row, masked in rows.items() if masked.constraint.error is None}
    for row in rows.keys() - filled.keys():
        _log_no_mask(builder, row, rows[row].constraint.error)
    if len(filled) == len(rows):
        return StepMasks(builder.step_id, list(filled), bytes(bits))
    kept = (bits[size * first : size * (first + 1 + len(drafts))] for _, drafts, first in filled.values())
    return StepMasks(builder.step_id, list(filled), b"".join(kept))


def _log_no_mask(builder: StepBuilder, row: int, error: str | None) -> None:
    logger.info("%s has no mask for step %d: %s", builder.requests[row].record.id, builder.step_id, error)
