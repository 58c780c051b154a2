"""The index of cached blocks, against sets that are searched one by one."""

from hypothesis import given
from hypothesis import strategies as st
from starling_router.index import GuessedIndex, PrefixIndex, Snapshots, longest_prefixes

BLOCKS = st.lists(st.integers(0, 20), max_size=12, unique=True)
CHANGES = st.lists(st.tuples(st.sampled_from(["add", "remove", "forget"]), st.integers(0, 70), BLOCKS), max_size=30)


@given(CHANGES, CHANGES, BLOCKS)
def test_longest_prefixes_are_those_of_sets(device: list, host: list, prompt: list[int]) -> None:  # type: ignore[type-arg]
    indexes, sets = (PrefixIndex(), PrefixIndex()), ({}, {})  # type: ignore[var-annotated]
    for changes, index, own in zip((device, host), indexes, sets, strict=True):
        for change, backend, blocks in changes:
            if change == "add":
                index.add(backend, blocks)
                own.setdefault(backend, set()).update(blocks)
            elif change == "remove":
                index.remove(backend, blocks)
                own.get(backend, set()).difference_update(blocks)
            else:
                index.forget(backend)
                own.pop(backend, None)
            assert index.count(backend) == len(own.get(backend, ()))
    expected = {}
    for backend in range(71):
        has = sets[0].get(backend, set()) | sets[1].get(backend, set())
        count = next((i for i, block in enumerate(prompt) if block not in has), len(prompt))
        if count:
            expected[backend] = count
    assert dict(longest_prefixes(indexes, prompt)) == expected


CACHED = st.dictionaries(st.integers(0, 6), BLOCKS)
NEEDS = st.lists(st.sampled_from(["blocks", "snapshots", "both"]), min_size=7, max_size=7)


@given(NEEDS, CACHED, st.tuples(CACHED, CACHED), BLOCKS)
def test_prefixes_of_states_end_at_snapshots(
    needs: list[str], blocks: dict[int, list[int]], snapshots: tuple[dict[int, list[int]], ...], prompt: list[int]
) -> None:
    """A backend may have none, and one that needs none may be told of some."""
    index, found = PrefixIndex(), Snapshots((PrefixIndex(), PrefixIndex()))
    for backend, need in enumerate(needs):
        index.add(backend, blocks.get(backend, ()))
        for cached, medium in zip(snapshots, found.indexes, strict=True):
            medium.add(backend, cached.get(backend, ()))
        found.set(backend, needed=need != "blocks", alone=need == "snapshots")
    expected = {}
    for backend, need in enumerate(needs):
        has = set(prompt) if need == "snapshots" else set(blocks.get(backend, ()))
        count = next((i for i, block in enumerate(prompt) if block not in has), len(prompt))
        if need != "blocks":
            ends = {block for cached in snapshots for block in cached.get(backend, ())}
            count = next((n for n in range(count, 0, -1) if prompt[n - 1] in ends), 0)
        if count:
            expected[backend] = count
    assert dict(longest_prefixes((index,), prompt, found)) == expected


def test_forgotten_blocks_take_no_memory() -> None:
    index = PrefixIndex()
    for backend in range(3):
        index.add(backend, range(100))
    index.forget(0)
    index.remove(1, range(100))
    index.forget(2)
    assert not index._masks


def test_guesses_of_the_ends_of_old_prompts_are_given_up_first() -> None:
    guessed = GuessedIndex(most=4)
    guessed.sent(0, [1, 2, 3])
    guessed.sent(0, [1, 2, 9, 10])
    assert dict(longest_prefixes((guessed.index,), [1, 2, 3])) == {0: 2}
    assert dict(longest_prefixes((guessed.index,), [1, 2, 9, 10])) == {0: 4}
    assert guessed.index.count(0) == 4
