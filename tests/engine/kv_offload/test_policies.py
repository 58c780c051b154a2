"""The three choices of KV offload, as tables."""

import pytest
from starling_engine.kv_offload.policies import (
    BURST,
    PATIENCE,
    PROBE_EVERY,
    WRITE_SHARE,
    LookupPolicy,
    SwapPolicy,
    TransferCosts,
    WriteBackBudget,
)


def costs(store: float | None = None, load: float | None = None, token: float | None = None) -> TransferCosts:
    made = TransferCosts()
    made.store, made.load, made.token = store, load, token
    return made


@pytest.mark.parametrize(
    "preempt, known, tokens, chunks, pays",
    [
        ("swap", costs(9.0, 9.0, 1e-9), 64, 1, True),
        ("recompute", costs(0.0, 0.0, 1.0), 64, 1, False),
        ("auto", costs(), 64, 1, True),
        ("auto", costs(token=1e-3), 64, 1, True),
        ("auto", costs(store=1e-3), 64, 1, True),
        ("auto", costs(0.03, 0.03, 1e-3), 64, 1, True),
        ("auto", costs(0.03, 0.04, 1e-3), 64, 1, False),
        ("auto", costs(0.033, None, 1e-3), 64, 1, False),
        ("auto", costs(0.03, 0.03, 1e-3), 64, 2, False),
    ],
)
def test_the_cheaper_of_swap_and_recompute(preempt: str, known: TransferCosts, tokens: int, chunks: int, pays: bool) -> None:
    assert SwapPolicy(preempt, known).pays(tokens, chunks) == pays


@pytest.mark.parametrize(
    "token, lookups, pays",
    [
        (None, [(3.0, 0)], True),
        (1e-3, [], True),
        (1e-3, 30 * [(PATIENCE, 0)], True),
        (1e-3, 30 * [(PATIENCE + 1e-3, 0)], False),
        (1e-3, 20 * [(0.07, 64)], True),
        (1e-3, 20 * [(0.08, 64)], False),
        (1e-3, [(1.0, 64), (0.001, 64)], False),
        (1e-3, [(1.0, 64)] + 20 * [(0.001, 64)], True),
        (1e-6, 20 * [(0.02, 1000)], False),
    ],
)
def test_lookups_pay_while_they_spare_more_than_they_take(
    token: float | None, lookups: list[tuple[float, int]], pays: bool
) -> None:
    policy = LookupPolicy(costs(token=token))
    for seconds, spared in lookups:
        policy.ended(seconds, spared, is_probe=False)
    assert policy.pays() == pays


def test_the_last_probe_alone_counts() -> None:
    policy = LookupPolicy(costs(token=1e-3))
    policy.ended(5.0, 0, is_probe=False)
    assert not policy.pays()
    policy.ended(0.001, 64, is_probe=True)
    assert policy.pays()
    policy.ended(1.0, 64, is_probe=True)
    assert not policy.pays()


def test_one_request_in_sixteen_probes() -> None:
    policy = LookupPolicy(costs())
    assert [at for at in range(1, 40) if policy.probe_is_due()] == [PROBE_EVERY, 2 * PROBE_EVERY]


@pytest.mark.parametrize(
    "stepped, spared, spent, allows",
    [
        (0.0, 0.0, 0.0, True),
        (1.0, 0.0, WRITE_SHARE, True),
        (1.0, 0.0, 2 * WRITE_SHARE, False),
        (0.0, 0.2, 0.1, True),
        (0.0, 0.2, 0.11, False),
        (1e6, 0.0, BURST, True),
        (1e6, 0.0, 1.1 * BURST, False),
    ],
)
def test_write_back_spends_what_steps_and_hits_have_earned(stepped: float, spared: float, spent: float, allows: bool) -> None:
    budget = WriteBackBudget()
    budget.stepped(stepped)
    budget.spared(spared)
    budget.spent(spent)
    assert budget.allows == allows


def test_a_wrong_measurement_is_forgotten() -> None:
    budget = WriteBackBudget()
    budget.spent(1e6)
    budget.stepped(0.99 * BURST / WRITE_SHARE)
    assert not budget.allows
    budget.stepped(0.02 * BURST / WRITE_SHARE)
    assert budget.allows
