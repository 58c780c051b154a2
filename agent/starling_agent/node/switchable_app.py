"""The endpoint's application: the engine's while there is one, otherwise one that answers why there is none."""

import math

from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Receive, Scope, Send
from starling_engine import AsyncEngine

from starling_agent.contract.report import Report
from starling_agent.drain import Drain
from starling_agent.http.errors import ApiError
from starling_agent.http.open_requests import OpenRequests
from starling_agent.metrics.exporter import CacheShape, EngineCollector, Exporter
from starling_agent.metrics.requests import RequestMetrics
from starling_agent.node.metrics import AgentCollector, EngineTotals
from starling_agent.openai.app import create_app
from starling_agent.openai.endpoint import Endpoint
from starling_agent.openai.responses.background import background_responses
from starling_agent.openai.unavailable_app import create_unavailable_app
from starling_agent.report_state import ReportState
from starling_agent.settings import ServerSettings

RETRY_SECONDS = 2
MAX_RETRY_SECONDS = 30


class SwitchableApp:
    """The application of the endpoint's server. Open requests, stored responses, metrics and totals belong to it:
    they outlive each engine.
    """

    def __init__(
        self, settings: ServerSettings, state: ReportState, open_requests: OpenRequests, cache: CacheShape, *collectors: Collector
    ) -> None:
        """`collectors`: metrics of the agent's other parts. Raises ConfigError for a folder that cannot be written."""
        self.drain = Drain()
        self._settings = settings
        self._open_requests = open_requests
        self.background = background_responses(settings, open_requests)
        self.metrics = RequestMetrics()
        self._totals = EngineTotals()
        names, totals = settings.served_model_names, self._totals
        engine = EngineCollector(totals.stats, names[0], cache, self.metrics, totals.sleep_level)
        self._exporter = Exporter(engine, AgentCollector(lambda: state.report), *collectors)
        self._unavailable = create_unavailable_app(
            settings, self.drain, self.metrics, self._exporter, lambda: unavailable_error(state.report)
        )
        self._app: ASGIApp = self._unavailable
        self._endpoint: Endpoint | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    @property
    def is_open(self) -> bool:
        return self._endpoint is not None

    def open(self, engine: AsyncEngine) -> None:
        """Directs new requests to this engine."""
        self._totals.begin(engine)
        self._endpoint = Endpoint(
            engine,
            self._settings,
            self.drain,
            self._open_requests,
            self.background,
            metrics=self.metrics,
            exporter=self._exporter,
        )
        self._endpoint.open()
        self._app = create_app(self._endpoint)

    def close(self) -> None:
        """Answers new requests without an engine; open ones end with the engine that has them."""
        if self._endpoint is not None:
            self._totals.end()
            self._app = self._unavailable
            self._endpoint.close()
            self._endpoint = None


def unavailable_error(report: Report) -> ApiError:
    """Makes a 503 with the phase. OpenAI's clients obey Retry-After, so it is the time after which another try makes sense."""
    message = f"the model is not being served now: {report.phase}"
    wait = RETRY_SECONDS
    if report.phase == "failed":
        message, wait = f"{message}; {report.last_error}", MAX_RETRY_SECONDS
    elif report.progress is not None:
        message = f"{message}, {100 * report.progress.done // report.progress.total} % done"
        wait = math.ceil(min(max(report.progress.eta_seconds or wait, 1), MAX_RETRY_SECONDS))
    return ApiError(503, message, kind="server_error", code="engine_not_ready", headers={"Retry-After": str(wait)})
