"""Operations on the group's size, as the leader records them; its SizeController carries them out."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import structlog
from prometheus_client import Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starling_engine.elastic.coordinator import SizeChange, Stage
from starling_engine.errors import StarlingError

from starling_agent.contract.config import LayoutConfig
from starling_agent.contract.scale import LoadedExperts, Operation, ScaleRequest
from starling_agent.group.leader import not_leader
from starling_agent.group.size_controller import SizeController
from starling_agent.http.errors import ApiError

REMEMBERED = 64
"""Operations that have ended and are still known."""
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
"""Seconds: from a commit between two tokens to the loading of a large model."""
SCALE_STATUS = {"invalid_target": 400, "unknown_operation": 404}
"""HTTP status by code of a ScaleRefusal; other codes have 409."""
log = structlog.get_logger("starling.group")


class ScaleRefusal(Exception):
    """Nothing has changed. `code` is one of those of `contract.scale`; the message is for people and says what is possible."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class OperationTimes(Collector):
    """Metrics of the seconds that operations take. Each counts once, when it has ended."""

    def __init__(self) -> None:
        self._seen: str | None = None
        self._seconds = Histogram(
            "starling:elastic_operation_seconds", "What phases of changes of size took.", ["phase"], registry=None, buckets=BUCKETS
        )

    def observe(self, operation: Operation) -> None:
        if not operation.ended or operation.id == self._seen:
            return
        self._seen = operation.id
        for phase, seconds in operation.seconds.items():
            self._seconds.labels(phase).observe(seconds)

    def collect(self) -> Iterable[Metric]:
        return self._seconds.collect()


class Operations:
    """Runs one operation at a time. `update_report` takes changes of the agent's report: each new state of an operation."""

    def __init__(self, layout: LayoutConfig, controller: SizeController, update_report: Callable[..., Any]) -> None:
        self.times = OperationTimes()
        self._layout = layout
        self._controller = controller
        self._update_report = update_report
        self._known: OrderedDict[str, Operation] = OrderedDict()
        self._running: asyncio.Task[None] | None = None

    def put(self, request: ScaleRequest) -> Operation:
        known = self._known.get(request.operation)
        if known is not None:
            if known.target != request.data:
                raise ScaleRefusal("invalid_target", f"data: operation {known.id} is to {known.target}, got {request.data}")
            return known
        self._check(request)
        source, nodes = self._controller.data, self._layout.at(request.data).nodes
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
        dead = self._controller.dead
        if dead is not None:
            raise ScaleRefusal("rank_dead", f"a lost rank is no smaller size, and is started again first: {dead}")

    async def _carry_out(self, name: str, target: int) -> None:
        change = SizeChange(target)
        change.on_stage = lambda stage: self._enter(name, stage, change)
        try:
            epoch = await self._controller.resize(change)
        except asyncio.CancelledError:
            self._end(name, change, phase="cancelled")
        except StarlingError as error:
            self._end(name, change, phase="failed", error=str(error))
        else:
            self._end(name, change, phase="done", progress=1.0, epoch=epoch)

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
        self._update_report(operation=operation)
        self.times.observe(operation)

    def _newest(self) -> str:
        return next(reversed(self._known), "none")


# ---- `/admin/scale`, as `contract.scale` describes it ----


async def answer_scale(request: Request, operations: Operations | None, leader_address: str) -> Response:
    """Begins, reads or cancels an operation. `operations` is None on other nodes than the leader. Raises ApiError."""
    if operations is None:
        raise not_leader(leader_address)
    try:
        operation = await _operation(request, operations)
    except ScaleRefusal as refused:
        raise ApiError(SCALE_STATUS.get(refused.code, 409), str(refused), code=refused.code, param=_param(refused)) from None
    status = 200 if request.method in ("GET", "HEAD") else 202
    return Response(operation.model_dump_json(), status, media_type="application/json")


async def _operation(request: Request, operations: Operations) -> Operation:
    if request.method == "PUT":
        return operations.put(await _scale_request(request))
    name = request.query_params.get("operation")
    if not name:
        raise ApiError(400, "operation: give the id of one, as ?operation=ID", param="operation", code="invalid_value")
    return operations.cancel(name) if request.method == "DELETE" else operations.get(name)


async def _scale_request(request: Request) -> ScaleRequest:
    try:
        return ScaleRequest.model_validate_json(await request.body())
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0]) if first["loc"] else None
        code = "invalid_target" if field == "data" else "invalid_value"
        raise ApiError(400, f"{field or 'body'}: {first['msg']}", param=field, code=code) from None


def _param(refused: ScaleRefusal) -> str | None:
    return {"invalid_target": "data", "unknown_operation": "operation"}.get(refused.code)
