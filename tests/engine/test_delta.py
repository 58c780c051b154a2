"""Counters of several cores as one."""

from starling_engine.delta import Stats, TierStats, add_stats, add_totals


def core(running: int, **tiers: TierStats) -> Stats:
    return Stats(running=running, steps_total=10, tiers=tiers)


CPU = TierStats(bytes=5, capacity=8, objects=1, queries_total=4, hits_total=3, load_seconds_total=0.5)
FOLDER = TierStats(bytes=50, capacity=80, objects=10, shared=True, queries_total=4, hits_total=3)


def test_cores_that_serve_are_summed_and_what_they_share_is_not() -> None:
    total = Stats()
    for each in (core(1, cpu=CPU, filesystem=FOLDER), core(2, cpu=CPU, filesystem=FOLDER)):
        add_stats(total, each)
    cpu = TierStats(bytes=10, capacity=16, objects=2, queries_total=8, hits_total=6, load_seconds_total=1.0)
    folder = TierStats(bytes=50, capacity=80, objects=10, shared=True, queries_total=8, hits_total=6)
    assert total == Stats(running=3, steps_total=20, tiers={"cpu": cpu, "filesystem": folder})
    assert CPU.bytes == 5, "it is of a core that counts on"


def test_of_cores_that_have_ended_only_the_totals_count() -> None:
    past = Stats()
    add_totals(past, core(1, filesystem=FOLDER))
    assert past == Stats(steps_total=10, tiers={"filesystem": TierStats(queries_total=4, hits_total=3)})
    add_stats(past, core(1, filesystem=FOLDER))
    assert past.tiers["filesystem"] == TierStats(bytes=50, capacity=80, objects=10, shared=True, queries_total=8, hits_total=6)
