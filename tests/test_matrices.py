"""The sample of a matrix misses no value, and of three axes no pair."""

from itertools import combinations, product

import pytest

from tests.matrices import sample


@pytest.mark.parametrize(("sizes", "most"), [((5,), 5), ((4, 3), 4), ((2, 2, 2), 6), ((4, 3, 5), 24), ((3, 3, 3, 3), 16)])
def test_a_sample_covers(sizes: tuple[int, ...], most: int) -> None:
    cases = [dict(zip("abcd", values, strict=False)) for values in product(*map(range, sizes))]
    taken = [cases[at] for at in sample(cases)]
    together = 2 if len(sizes) > 2 else 1

    def covered(some: list[dict[str, int]]) -> set[frozenset[tuple[str, int]]]:
        return {frozenset(pair) for case in some for pair in combinations(case.items(), together)}

    assert covered(taken) == covered(cases)
    assert len(taken) <= most


def test_no_cases_give_none() -> None:
    assert sample([]) == []
