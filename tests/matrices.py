"""Which cases of a matrix of parameters run in every test run, and which only in a whole one."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

Case = Mapping[str, Hashable]
"""The value of each axis."""


def sample(cases: Sequence[Case]) -> list[int]:
    """Indexes of a few cases in which every pair of two axes' values occurs; of two axes or one, every value.

    Greedy: the case that adds most comes next, of equals one whose values are rare so far. Faults that need three values at once
    are few (Kuhn, Wallace and Gallo, "Software fault interactions and implications for software testing", IEEE TSE 30(6), 2004).
    """
    together = 2 if cases and len(cases[0]) > 2 else 1
    missing = {at: {frozenset(some) for some in combinations(case.items(), together)} for at, case in enumerate(cases)}
    wanted = set().union(*missing.values())
    taken: list[int] = []
    used = Counter[tuple[str, Hashable]]()
    while wanted:
        best = max(missing, key=lambda at: (len(missing[at] & wanted), -sum(used[value] for value in cases[at].items())))
        wanted -= missing.pop(best)
        used.update(cases[best].items())
        taken.append(best)
    return sorted(taken)
