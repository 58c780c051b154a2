"""Which kernel sums, by what others have measured of such kernels."""

import pytest
from starling_engine.parallel.peer_sums import MAX_BYTES, MAX_RANKS, one_shot_bytes, seconds

MIB = 1 << 20
MEASURED = {
    2: {0.5: (7, 12), 1: (9, 14), 1.5: (11, 17), 2: (13, 19)},
    6: {0.5: (13, 15), 1: (21, 17), 1.5: (30, 20), 2: (38, 26), 3: (53, 29), 4: (70, 37)},
}
"""Microseconds of vLLM's kernels in one shot and in two on H100s, by ranks and MiB (vllm-project/vllm, pull request 24111)."""


def test_sums_are_expected_to_take_what_others_have_measured() -> None:
    for ranks, sizes in MEASURED.items():
        for mib, measured in sizes.items():
            size = int(mib * MIB)
            assert [1e6 * seconds(size, ranks, shots=shots) for shots in (1, 2)] == pytest.approx(measured, rel=0.15), (ranks, mib)
            assert (size <= one_shot_bytes(ranks)) is (measured[0] < measured[1])


def test_where_there_are_two_shots_some_power_of_two_takes_them() -> None:
    """Steps of such numbers of tokens are run before requests come, so that both kernels are met."""
    assert one_shot_bytes(2) == MAX_BYTES
    bounds = [one_shot_bytes(ranks) for ranks in range(3, MAX_RANKS + 1)]
    assert bounds == sorted(bounds, reverse=True) and bounds[0] <= MAX_BYTES // 2 and bounds[-1] > 1 << 18
