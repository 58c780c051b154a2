"""The three choices of KV offload: swap or recompute, look up or pass by, write back now or later.

Each is a fixed rule over what has been measured, with one knob, and knows nothing of requests, blocks or tiers.
"""

from starling_engine.config import PreemptionMode

PATIENCE = 0.01
"""Seconds that lookups may take on average without finding anything."""
PROBE_EVERY = 16
"""Requests of which one looks up beside its computing, while they pass the secondary tiers by."""
WRITE_SHARE = 1 / 100
"""Share of the steps' time that write-back may take."""
BURST = 0.2
"""Seconds of steps that write-back may take at once, or have taken too much of."""


class TransferCosts:
    """Running means in seconds; None until measured.

    store, load  one chunk between the device and the primary tier
    token        one token of a prompt to compute
    write        what writing one chunk back takes from steps on the same processors
    """

    def __init__(self) -> None:
        self.store: float | None = None
        self.load: float | None = None
        self.token: float | None = None
        self.write: float | None = None

    def stored(self, chunks: int, seconds: float) -> None:
        self.store = _mean(self.store, seconds / chunks)

    def loaded(self, chunks: int, seconds: float) -> None:
        self.load = _mean(self.load, seconds / chunks)

    def computed(self, tokens: int, seconds: float) -> None:
        if tokens >= 32 and seconds:  # fewer say little about the cost of a prompt
            self.token = _mean(self.token, seconds / tokens)

    def wrote(self, chunks: int, seconds: float) -> None:
        if chunks:
            self.write = _mean(self.write, seconds / chunks)


class SwapPolicy:
    """Decides whether a preempted request stores its chunks or computes them again. `preempt` "auto" takes the cheaper."""

    def __init__(self, preempt: PreemptionMode, costs: TransferCosts) -> None:
        self._preempt = preempt
        self._costs = costs

    def pays(self, tokens: int, chunks: int) -> bool:
        """Compares `tokens` to compute with `chunks` to store and load. Costs that are not known yet speak for storing."""
        if self._preempt != "auto":
            return self._preempt == "swap"
        token, store = self._costs.token, self._costs.store
        if token is None or store is None:
            return True
        load = store if self._costs.load is None else self._costs.load
        return chunks * (store + load) < tokens * token


class LookupPolicy:
    """Decides whether requests wait for the secondary tiers: a slow tier must not make requests slower than none.

    The rule: the mean wait of a lookup may be as long as computing the tokens that it spares, plus PATIENCE. While the tiers are
    passed by, a probe shows how they are now, and its outcome alone counts.
    """

    def __init__(self, costs: TransferCosts) -> None:
        self._costs = costs
        self._waited = self._spared = 0.0
        """Means of one lookup: seconds, and tokens that need not be computed."""
        self._passed = 0

    def pays(self) -> bool:
        """Returns whether the next request is to look up."""
        token = self._costs.token
        return token is None or self._waited <= self._spared * token + PATIENCE

    def probe_is_due(self) -> bool:
        """Counts a request that passes by; returns whether it is to look up without waiting."""
        self._passed += 1
        return self._passed % PROBE_EVERY == 0

    def ended(self, seconds: float, spared: int, *, is_probe: bool) -> None:
        """A lookup took `seconds` and spared its request so many tokens."""
        if is_probe:
            self._waited, self._spared = seconds, spared
        else:
            self._waited, self._spared = _mean(self._waited, seconds), _mean(self._spared, spared)


class WriteBackBudget:
    """Seconds that write-back may take from steps: WRITE_SHARE of their time, and half of what found chunks have spared.

    Writing is a bet on later requests, so it pays for itself where they come. Both credit and debt end at BURST: a wrong
    measurement is forgotten after 20 seconds of steps.
    """

    def __init__(self) -> None:
        self._credit = 0.0

    @property
    def allows(self) -> bool:
        """True if an order may be given while steps run."""
        return self._credit >= 0

    def stepped(self, seconds: float) -> None:
        """Steps have computed for `seconds`."""
        self._add(WRITE_SHARE * seconds)

    def spared(self, seconds: float) -> None:
        """Requests found chunks whose tokens would have taken `seconds` to compute."""
        self._add(seconds / 2)

    def spent(self, seconds: float) -> None:
        """An order took `seconds` from steps."""
        self._add(-seconds)

    def _add(self, seconds: float) -> None:
        self._credit = max(-BURST, min(BURST, self._credit + seconds))


def _mean(mean: float | None, value: float, weight: float = 0.2) -> float:
    """Returns a running mean with one more value; None is that of no value."""
    return value if mean is None else (1 - weight) * mean + weight * value
