"""A rank's share of a tensor's dimension. Pure: no torch, no processes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """`size` elements from `start` on, of `whole`."""

    start: int
    size: int
    whole: int

    @classmethod
    def all(cls, whole: int) -> "Share":
        return cls(0, whole, whole)

    @property
    def slice(self) -> slice:
        return slice(self.start, self.start + self.size)

    def times(self, width: int) -> "Share":
        """Returns the same share in smaller elements: a share of heads becomes one of their columns."""
        return Share(self.start * width, self.size * width, self.whole * width)


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` of `count` equal parts."""

    index: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index + 1 == self.count

    def of(self, whole: int) -> Share:
        """Returns this shard's share. `whole` must be a multiple of the count (see `check_split`)."""
        assert whole % self.count == 0, f"{whole} does not split into {self.count}"
        size = whole // self.count
        return Share(self.index * size, size, whole)

    def heads(self, whole: int) -> Share:
        """Returns the share of key-value heads. With fewer heads than parts, several parts hold the same one."""
        if whole >= self.count:
            return self.of(whole)
        return Share(self.index * whole // self.count, 1, whole)

    def balanced(self, whole: int) -> Share:
        """Returns this shard's share of any whole: parts differ by one at most."""
        start = self.index * whole // self.count
        return Share(start, (self.index + 1) * whole // self.count - start, whole)

    def rounded(self, whole: int) -> Share:
        """Returns this shard's share of any whole: the last parts hold less, or nothing."""
        size = self.rounded_size(whole)
        start = min(self.index * size, whole)
        return Share(start, min(size, whole - start), whole)

    def rounded_size(self, whole: int) -> int:
        """Returns the size of the largest part of `rounded`."""
        return -(-whole // self.count)


ALL = Shard()
"""The one part of an undivided whole."""
