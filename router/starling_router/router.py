"""A router with all its parts."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from starling_agent.contract.router_report import CanaryNotice
from starling_agent.drain import Drain
from starling_agent.http.middleware_stack import with_middleware
from starling_agent.http.open_requests import OpenRequests
from starling_agent.settings import ServerSettings
from starling_engine.errors import ConfigError

from starling_router.accounts import Accounts
from starling_router.app import RouterApp
from starling_router.backend import Backends
from starling_router.canary import CanaryTraffic
from starling_router.discovery import BackendSources, Discovery
from starling_router.events import CachedBlocks
from starling_router.exact import ExactPrompts
from starling_router.hold import Hold
from starling_router.hold_queue import NEVER_HOLD, HoldPolicy
from starling_router.index import GuessedIndex
from starling_router.learned import LearnedPrompts
from starling_router.metrics import RouterMetrics
from starling_router.operator_polls import OperatorPolls
from starling_router.picker import Picker, RouterPolicy
from starling_router.prefixes import Prefixes
from starling_router.prompt_source import PromptSource
from starling_router.questions import Questions
from starling_router.routing import RequestRouting
from starling_router.service_state import ServiceState
from starling_router.shadows import SOME_SHADOWS, ShadowPolicy, Shadows
from starling_router.tenants import NO_TENANTS, Tenancy
from starling_router.ui.app import UiApp
from starling_router.ui.state import UiView
from starling_router.upstream import Upstream
from starling_router.watch import BackendWatch

if TYPE_CHECKING:
    from starling_router.epp.server import EppServer

GUESSED_BLOCKS = 20_000
"""Blocks of text that are remembered of each backend, some 1.3 million tokens."""


class ServiceRouter:
    """Belongs to the event loop that it is made in. `app` is to be served; `responses` counts its answers.

    `own_key` returns the key of the router's own questions; requests go on with the keys of their clients. Prompts are
    looked for in what backends say that they have cached, by their own tokenizer or an `exact` one that is given. Where they say
    nothing, prompts are looked for in what they were sent.
    """

    def __init__(
        self,
        settings: ServerSettings,
        policy: RouterPolicy,
        own_key: Callable[[], str | None] = lambda: None,
        exact: ExactPrompts | None = None,
        hold: HoldPolicy = NEVER_HOLD,
        tenancy: Tenancy = NO_TENANTS,
        shadows: ShadowPolicy = SOME_SHADOWS,
        canary: CanaryNotice | None = None,
    ) -> None:
        """`canary` is known from the start; what the operator tells counts from then on."""
        self.drain, self.open_requests = Drain(), OpenRequests()
        self.responses: Counter[tuple[str, int]] = Counter()
        self.backends = backends = Backends()
        cached, guessed = CachedBlocks(), GuessedIndex(GUESSED_BLOCKS)
        self._upstream = Upstream()
        self._metrics = metrics = RouterMetrics(backends)
        metrics.weights({"prefix": policy.prefix, "load": policy.load, "session": policy.session})
        state, token, traffic = ServiceState(), settings.router_token, CanaryTraffic(metrics.registry)
        traffic.take(canary)
        self._hold = Hold(hold, backends, metrics, state, traffic, max(1, len(tenancy.tenants)))
        self._shadows = Shadows(shadows, traffic, backends, self._upstream, self._hold, token)
        questions = Questions(self._upstream, own_key, token)
        self.learned = LearnedPrompts(questions, settings, exact)
        self._watch = BackendWatch(backends, questions, self.learned, cached, guessed, self._hold.ready, self._hold.room)
        picker, accounts = Picker(policy), Accounts(tenancy, metrics)
        prompts, prefixes = PromptSource(self.learned, self._watch.followed), Prefixes(cached, guessed)
        view = UiView(backends, self._watch.states, accounts, metrics, traffic)
        self._routing = RequestRouting(
            backends, picker, prompts, prefixes, self._hold, metrics, accounts, traffic, self._shadows, token
        )
        polls = OperatorPolls(self._hold.demand, state, traffic, token)
        app = RouterApp(self._routing, self._upstream, self.drain, self.open_requests, UiApp(view, accounts), state, polls)
        self._settings, self._state, self._looked = settings, state, asyncio.Event()
        self.app = with_middleware(app, settings, self.drain, self.responses)

    def endpoint_picker(self, fallbacks: int = 0) -> "EppServer":
        """Makes the endpoint picker of a gateway, once: it picks among the same backends, and counts together with `app`.

        `fallbacks` is that of EppSettings.

        Raises ConfigError where the packages for it are missing, and where a backend's URL has a name in place of an address.
        """
        try:  # they are an extra
            from starling_router.epp.metrics import EppMetrics
            from starling_router.epp.pick_app import PickApp, endpoint_of
            from starling_router.epp.server import EppServer
        except ModuleNotFoundError as error:
            raise ConfigError(f"needs the package {error.name}: pip install 'starling[gateway]'", "epp_port") from None
        for backend in self.backends.all:
            endpoint_of(backend.url)
        epp_metrics = EppMetrics(self._metrics.registry, self.backends, self._watch.states, lambda: len(self._hold.queue))
        app = PickApp(self._routing, epp_metrics, self._state, fallbacks)
        return EppServer(with_middleware(app, self._settings, self.drain, self.responses))

    def set_backends(self, urls: Mapping[str, str]) -> None:
        """Sets the servers to route to, by name. Those that stay keep what is known of them."""
        self._watch.set(urls)

    async def find_backends(self, sources: BackendSources) -> None:
        """Sets the servers to those that `sources` have, again and again, until it is cancelled."""
        await Discovery(self._watch, sources, self._looked.set).run()

    async def knows_backends(self) -> None:
        """Waits until servers have been looked for once, and those that were found have answered, or have not in time."""
        await self._looked.wait()
        await self._watch.first_answers()

    def end_polls(self) -> None:
        """Answers the operator, which waits for news; from now on it gets them without a wait."""
        self._hold.demand.end()

    def end_holding(self) -> None:
        """Ends requests that wait for a backend. From now on none waits."""
        self._hold.end()

    async def close(self) -> None:
        self._hold.end()
        await self._shadows.close()
        await self._watch.close()
        await self.learned.close()
        await self._upstream.close()
