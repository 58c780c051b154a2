"""Synthetic prompts and arrival times: the same seed gives the same ones everywhere."""

import random
from collections.abc import Iterator

WORDS = """
    the a of and to in is that for with as on by from at or an be this it are not which can when if one all each into value list
    name type call class method object string number file module function return argument default index order first last empty
    error test item key loop range set time line text byte read write open close state size
""".split()  # noqa: SIM905 - a list of as many literals is a page long


def prompts(count: int, words: int, seed: int) -> list[str]:
    """Texts of `words` common words, about as many tokens; all different from their first word on.

    A number leads each, so that no two share a prefix that a cache could answer.
    """
    generator = random.Random(seed)
    return [f"{generator.randrange(10**8)} " + " ".join(generator.choices(WORDS, k=max(0, words - 1))) for _ in range(count)]


def arrivals(count: int, rate: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which requests are sent: a Poisson process of `rate` a second; infinite: all at once."""
    generator = random.Random(seed + 1)
    now = 0.0
    for _ in range(count):
        yield now
        if rate != float("inf"):
            now += generator.expovariate(rate)
