"""Text that comes piece by piece is the text of the whole, and stop strings do not depend on where tokens or pushes end."""

import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from starling_engine.frontend.detokenizer import IncrementalDetokenizer
from starling_engine.frontend.stop_strings import first_stop, longest_beginning
from starling_engine.frontend.tokenizer import Tokenizer

from tests.engine.frontend.conftest import BYTE_KINDS, KINDS

ANY_TEXT = st.text() | st.text(alphabet="ab c\n€🎉é▁", max_size=40)
SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=20)


def pieces(detokenizer: IncrementalDetokenizer, ids: Sequence[int], sizes: Sequence[int] = (1,)) -> tuple[list[str], str | None]:
    """Pushes `ids` in chunks of the given sizes, over and over, until they or a stop string end it."""
    texts, at, turn = [], 0, 0
    while True:
        chunk = ids[at : at + sizes[turn % len(sizes)]] if any(sizes) else ids[at:]
        at, turn = at + len(chunk), turn + 1
        text, stop = detokenizer.push(chunk, finished=at == len(ids))
        texts.append(text)
        if stop is not None or at == len(ids):
            return texts, stop


@pytest.mark.parametrize("kind", KINDS)
@given(text=ANY_TEXT, sizes=SIZES, special=st.booleans())
def test_pieces_add_up_to_the_whole(kind: str, text: str, sizes: list[int], special: bool, loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded[kind]
    ids = tokenizer.encode(text, add_special_tokens=special)
    texts, _ = pieces(IncrementalDetokenizer(tokenizer, skip_special_tokens=special), ids, sizes)
    assert "".join(texts) == tokenizer.decode(ids, skip_special_tokens=special)


@given(data=st.data(), special=st.booleans())
def test_any_tokens_at_all_of_a_byte_level_tokenizer(data: st.DataObject, special: bool, loaded: dict[str, Tokenizer]) -> None:
    """A sampled sequence need not be UTF-8."""
    tokenizer = loaded["byte_level"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2)))
    texts, _ = pieces(IncrementalDetokenizer(tokenizer, skip_special_tokens=special), ids)
    assert "".join(texts) == tokenizer.decode(ids, skip_special_tokens=special)


@pytest.mark.parametrize("kind", KINDS)
@given(parts=st.lists(st.sampled_from(["shown", "hidden", "half a character", "text"]), max_size=12), sizes=SIZES)
def test_shown_tokens_are_where_their_offsets_say(
    kind: str, parts: list[str], sizes: list[int], loaded: dict[str, Tokenizer]
) -> None:
    """Other special tokens are hidden, and a stop string that never comes changes nothing."""
    tokenizer = loaded[kind]
    special = sorted(tokenizer.special_ids)
    shown, hidden = special[-1], special[0]
    name = tokenizer.token_text(shown)
    half = tokenizer.encode("🎉", add_special_tokens=False)[:1]
    ids = {
        "shown": [shown],
        "hidden": [hidden],
        "half a character": half,
        "text": tokenizer.encode(" stop<", add_special_tokens=False),
    }
    output = [token for part in parts for token in ids[part]]
    for stop in ((), (f"{name}never", "<never")):
        detokenizer = IncrementalDetokenizer(tokenizer, shown_ids=[shown], stop=stop)
        text = "".join(pieces(detokenizer, output, sizes)[0])
        found = detokenizer.shown_offsets
        assert [text[offset : offset + len(name)] for offset in found] == [name] * output.count(shown)
        assert tokenizer.token_text(hidden) not in text


@pytest.mark.parametrize("kind", KINDS)
@given(text=ANY_TEXT, share=st.floats(0, 1))
def test_goes_on_from_the_prompt(kind: str, text: str, share: float, loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded[kind]
    ids = tokenizer.encode(text)
    prompt, output = ids[: int(share * len(ids))], ids[int(share * len(ids)) :]
    before = tokenizer.decode(prompt)
    assume(not before.endswith("\ufffd"))
    texts, _ = pieces(IncrementalDetokenizer(tokenizer, prompt_ids=prompt), output)
    assert before + "".join(texts) == tokenizer.decode(ids)


def test_a_space_after_the_prompt_stays(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["sentence_piece"]
    ids = tokenizer.encode("over the", add_special_tokens=False)
    assert "".join(pieces(IncrementalDetokenizer(tokenizer), ids)[0]) == "over the"
    prompt = tokenizer.encode("jumps")
    assert "".join(pieces(IncrementalDetokenizer(tokenizer, prompt_ids=prompt), ids)[0]) == " over the"
    bare = tokenizer.encode("")
    assert "".join(pieces(IncrementalDetokenizer(tokenizer, prompt_ids=bare), ids)[0]) == "over the"


def test_completes_a_character_that_the_prompt_began(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["byte_level"]
    ids = tokenizer.encode("€!")
    assert "".join(pieces(IncrementalDetokenizer(tokenizer, prompt_ids=ids[:2]), ids[2:])[0]) == "€!"


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_never_shows_half_a_character(kind: str, loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded[kind]
    ids = tokenizer.encode("a€🎉b", add_special_tokens=False)
    texts, _ = pieces(IncrementalDetokenizer(tokenizer), ids)
    assert [text for text in texts if text] == ["a", "€", "🎉", "b"]


def test_an_output_that_ends_within_a_character(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["byte_level"]
    ids = tokenizer.encode("a🎉")[:-1]
    assert pieces(IncrementalDetokenizer(tokenizer), ids)[0] == ["a", "", "", "\ufffd"]


def test_good_characters_next_to_broken_ones_stay(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["gemma"]
    ids = [*tokenizer.encode("€", add_special_tokens=False), tokenizer.backend.token_to_id("<0xFF>") or 0]
    assert "".join(pieces(IncrementalDetokenizer(tokenizer), ids)[0]) == "€\ufffd"
    assert tokenizer.decode(ids) == "\ufffd" * 4


def reference_stop(tokenizer: Tokenizer, ids: list[int], stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character over the whole text."""
    text = tokenizer.decode(ids)
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[:end] if include else text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("kind", BYTE_KINDS)
@given(
    text=st.text(alphabet="ab c€", max_size=30),
    stops=st.lists(st.text(alphabet="ab c€", min_size=1, max_size=5), min_size=1, max_size=4),
    sizes=SIZES,
    include=st.booleans(),
)
@settings(max_examples=300)
def test_stop_strings_do_not_depend_on_tokens_or_pushes(
    kind: str, text: str, stops: list[str], sizes: list[int], include: bool, loaded: dict[str, Tokenizer]
) -> None:
    tokenizer = loaded[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts, stop = pieces(IncrementalDetokenizer(tokenizer, stop=stops, include_stop=include), ids, sizes)
    assert ("".join(texts), stop) == reference_stop(tokenizer, ids, stops, include)


@pytest.mark.parametrize(
    ("text", "stops", "shown", "stop"),
    [
        ("one two three", ["two"], "one ", "two"),
        ("one two three", ["three", "two"], "one ", "two"),
        ("one two three", ["o th"], "one tw", "o th"),
        ("abcd", ["bcd", "abc"], "", "abc"),
        ("abcd", ["bc", "abc"], "", "abc"),
        ("abab abac", ["abac"], "abab ", "abac"),
        ("aaab", ["aab"], "a", "aab"),
        ("price 5€", ["€"], "price 5", "€"),
        ("one", ["one"], "", "one"),
        ("one tw", ["two"], "one tw", None),
    ],
)
def test_stops(text: str, stops: list[str], shown: str, stop: str | None, loaded: dict[str, Tokenizer]) -> None:
    for kind in BYTE_KINDS:
        ids = loaded[kind].encode(text, add_special_tokens=False)
        texts, found = pieces(IncrementalDetokenizer(loaded[kind], stop=stops), ids)
        assert ("".join(texts), found) == (shown, stop)


def test_holds_back_only_what_may_become_a_stop_string(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["byte_level"]
    ids = [tokenizer.encode(char)[0] for char in "xa b€"]
    texts, _ = pieces(IncrementalDetokenizer(tokenizer, stop=["a b!"]), ids[:3])
    assert texts == ["x", "", "a "]  # the last push was the end
    texts, _ = pieces(IncrementalDetokenizer(tokenizer, stop=["a b!"]), tokenizer.encode("xa bc"))
    assert texts[0] == "x"
    assert "".join(texts) == "xa bc"


def test_counts_the_tokens_up_to_the_stop_string(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["byte_level"]
    ids = tokenizer.encode("x") + tokenizer.encode(" the") + tokenizer.encode("!") * 3
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["he!"])
    assert detokenizer.push(ids[:1], finished=False) == ("x", None)
    assert detokenizer.push(ids[1:], finished=True) == (" t", "he!")
    assert detokenizer.kept == 2


@pytest.mark.parametrize(("min_tokens", "shown"), [(0, ""), (1, "a"), (2, "aa"), (3, "aaa")])
def test_ignores_stop_strings_within_min_tokens(min_tokens: int, shown: str, loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["byte_level"]
    ids = tokenizer.encode("a")[:1] * 3
    texts, stop = pieces(IncrementalDetokenizer(tokenizer, stop=["a"], min_tokens=min_tokens), ids)
    assert ("".join(texts), stop) == (shown, "a" if min_tokens < 3 else None)


def test_an_ignored_stop_string_stays_ignored(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["byte_level"]
    ids = [tokenizer.encode(char)[0] for char in "abcd"]
    texts, stop = pieces(IncrementalDetokenizer(tokenizer, stop=["bc", "abcde"], min_tokens=3), ids)
    assert ("".join(texts), stop) == ("abcd", None)


def test_shows_special_tokens_when_asked(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["byte_level"]
    ids = tokenizer.encode("a<|im_end|>b")
    assert pieces(IncrementalDetokenizer(tokenizer, skip_special_tokens=False), ids)[0] == ["a", "<|im_end|>", "b"]
    assert pieces(IncrementalDetokenizer(tokenizer), ids)[0] == ["a", "", "b"]


@pytest.mark.parametrize(
    ("text", "stops", "length"),
    [("abc", ("cd",), 1), ("abc", ("abc",), 0), ("abc", ("bcd", "c!"), 2), ("aaa", ("aaaa",), 3), ("abc", ("x",), 0)],
)
def test_longest_beginning(text: str, stops: tuple[str, ...], length: int) -> None:
    assert longest_beginning(text, stops) == length


def test_first_stop_after() -> None:
    assert first_stop("abcabc", ["bc"]) == (1, "bc")
    assert first_stop("abcabc", ["bc"], after=3) == (4, "bc")
    assert first_stop("abc", ["bc"], after=3) is None


def test_time_for_a_token_does_not_grow(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["byte_level"]
    rng = random.Random(0)
    ids = [rng.randrange(tokenizer.vocab_size) for _ in range(20_000)]
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["never to be seen", "\n\n\n\nX"])
    began = time.thread_time()
    for token_id in ids:
        detokenizer.push([token_id], finished=False)
    assert time.thread_time() - began < 2.0  # 0.1 s on an idle core
