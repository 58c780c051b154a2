"""Operations on the group's size, as the leader records them; a Resizer carries them out."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

import structlog
from starling_engine.elastic.coordinator import SizeChange, Stage
from starling_engine.errors import StarlingError

from starling_agent.contract.config import LayoutConfig
from starling_agent.contract.scale import LoadedExperts, Operation, ScaleRequest
from starling_agent.group.resizer import Resizer

REMEMBERED = 64
"""Operations that have ended and are still known."""
log = structlog.get_logger("starling.group")


class ScaleRefusal(Exception):
    """Nothing has changed. `code` is one of those of `contract.scale`; the message is for people and says what is possible."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Operations:
    """Runs one operation at a time, once there is a Resizer. `on_change` is called with each new state of an operation."""

    def __init__(self, layout: LayoutConfig, on_change: Callable[[Operation], None]) -> None:
        self._layout = layout
        self._on_change = on_change
        self._known: OrderedDict[str, Operation] = OrderedDict()
        self._running: asyncio.Task[None] | None = None
        self._resizer: Resizer | None = None
        self._has_resizer = asyncio.Event()

    def set_resizer(self, resizer: Resizer | None) -> None:
        """Sets what carries changes out; with None they wait."""
        self._resizer = resizer
        if resizer is None:
            self._has_resizer.clear()
        else:
            self._has_resizer.set()

    def put(self, request: ScaleRequest) -> Operation:
        known = self._known.get(request.operation)
        if known is not None:
            if known.target != request.data:
                raise ScaleRefusal("invalid_target", f"data: operation {known.id} is to {known.target}, got {request.data}")
            return known
        self._check(request)
        source = self._resizer.data if self._resizer is not None else 0
        nodes = self._layout.at(request.data).nodes
        operation = Operation(id=request.operation, source=source, target=request.data, phase="waiting", nodes=nodes)
        self._record(operation)
        self._running = asyncio.create_task(self._carry_out(operation.id, request.data), name=f"operation {operation.id}")
        return operation

    def get(self, operation: str) -> Operation:
        known = self._known.get(operation)
        if known is None:
            raise ScaleRefusal("unknown_operation", f"no operation {operation!r} is known here; the newest is {self._newest()}")
        return known

    def cancel(self, operation: str) -> Operation:
        known = self.get(operation)
        if known.phase in ("committing", "releasing", "done"):
            raise ScaleRefusal("too_late", f"operation {operation} is {known.phase}: send another one for another size")
        if not known.ended and self._running is not None:
            self._running.cancel()
        return known

    def _check(self, request: ScaleRequest) -> None:
        bounds, layout = self._layout.elastic, self._layout
        if bounds is None:
            raise ScaleRefusal("invalid_target", f"data: this group keeps its size of {layout.data}: it has no elastic bounds")
        sizes = layout.largest.sizes(bounds.min, bounds.max)
        if request.data not in sizes:
            raise ScaleRefusal("invalid_target", f"data: possible are {', '.join(map(str, sizes))}, got {request.data}")
        running = next((known for known in self._known.values() if not known.ended), None)
        if running is not None:
            raise ScaleRefusal(
                "operation_running", f"operation {running.id} to {running.target} is {running.phase}; wait or cancel it"
            )
        dead = self._resizer.dead if self._resizer is not None else None
        if dead is not None:
            raise ScaleRefusal("rank_dead", f"a lost rank is no smaller size, and is started again first: {dead}")

    async def _carry_out(self, name: str, target: int) -> None:
        change = SizeChange(target)
        change.on_stage = lambda stage: self._enter(name, stage, change)
        try:
            await self._has_resizer.wait()
            assert self._resizer is not None
            await self._resizer.resize(change)
        except asyncio.CancelledError:
            self._end(name, change, phase="cancelled")
        except StarlingError as error:
            self._end(name, change, phase="failed", error=str(error))
        else:
            self._end(name, change, phase="done", progress=1.0, epoch=self._resizer.epoch)

    def _enter(self, name: str, stage: Stage, change: SizeChange) -> None:
        self._record(self._known[name].model_copy(update={"phase": stage, "seconds": dict(change.seconds)}))

    def _end(self, name: str, change: SizeChange, **result: object) -> None:
        change.end_stage()
        loaded = {
            source: LoadedExperts(experts=part.experts, bytes=part.bytes, bytes_per_second=round(part.rate))
            for source, part in change.loaded.items()
            if part.experts
        }
        self._record(self._known[name].model_copy(update={**result, "seconds": dict(change.seconds), "loaded": loaded}))

    def _record(self, operation: Operation) -> None:
        log.info("operation", id=operation.id, phase=operation.phase, target=operation.target, error=operation.error)
        self._known[operation.id] = operation
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        self._on_change(operation)

    def _newest(self) -> str:
        return next(reversed(self._known), "none")
