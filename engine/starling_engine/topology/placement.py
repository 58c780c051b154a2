"""The placement of experts on ranks. Pure: no torch, no processes."""

from dataclasses import dataclass

from starling_engine.errors import ConfigError

Layer = tuple[tuple[int, ...], ...]
"""The experts of each EP rank, in one layer: distinct, ascending."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Experts of each rank: `layers[i]` is for the model's i-th layer with experts. Every expert is on at least one rank.

    Ranks refer to experts by number. Only the rank itself knows which of its slots holds an expert.
    """

    num_experts: int
    layers: tuple[Layer, ...]

    @property
    def ranks(self) -> int:
        return len(self.layers[0])

    @property
    def slots(self) -> int:
        """The most experts that a rank holds in a layer."""
        return max(len(experts) for layer in self.layers for experts in layer)

    def held(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Returns the experts of `rank` in each layer; none for a rank that is not in this placement."""
        return tuple(layer[rank] if rank < self.ranks else () for layer in self.layers)


def even_slots(num_experts: int, ranks: int, redundant: int = 0) -> int:
    """Returns the slots that each rank needs for every expert and at least `redundant` copies; at most one for each expert."""
    return min(num_experts, -(-(num_experts + redundant) // ranks))


def spread(num_experts: int, ranks: int, layers: int, slots: int | None = None, redundant: int = 0) -> Placement:
    """Returns the first placement: neighbours share a rank, sizes differ by one at most, the first experts have `redundant` copies.

    Raises ConfigError if a rank would hold more than `slots` experts (None: any number), or experts are too few.
    """
    sizes = _sizes(num_experts, ranks, slots, redundant)
    ends = [sum(sizes[: rank + 1]) for rank in range(ranks)]
    layer = tuple(
        tuple(sorted(copy % num_experts for copy in range(end - size, end))) for size, end in zip(sizes, ends, strict=True)
    )
    return Placement(num_experts, (layer,) * layers)


def regroup(placement: Placement, ranks: int, slots: int | None = None, redundant: int = 0) -> Placement:
    """Returns `placement` for another number of ranks, with as few experts moved as equal sizes allow.

    Ranks leave and join at the end. Raises as `spread`.
    """
    sizes = _sizes(placement.num_experts, ranks, slots, redundant)
    known: dict[Layer, Layer] = {}  # layers are often placed alike
    for layer in placement.layers:
        if layer not in known:
            known[layer] = _regroup_layer(layer, placement.num_experts, sizes)
    return Placement(placement.num_experts, tuple(known[layer] for layer in placement.layers))


def moves(old: Placement | None, new: Placement, rank: int) -> tuple[tuple[int, ...], ...]:
    """Returns the experts of each layer that `rank`, which holds those of `old`, has to load for `new`."""
    if old is None:
        return new.held(rank)
    return tuple(
        tuple(expert for expert in after if expert not in before)
        for before, after in zip(map(set, old.held(rank)), new.held(rank), strict=True)
    )


def _sizes(num_experts: int, ranks: int, slots: int | None, redundant: int) -> list[int]:
    """Returns the number of experts on each rank, descending."""
    if not 1 <= ranks <= num_experts:
        raise ConfigError(
            f"{ranks} ranks cannot share the {num_experts} experts of a layer; possible: 1 to {num_experts}", "data_parallel_size"
        )
    total = num_experts + redundant
    if redundant < 0 or total > ranks * num_experts:
        raise ConfigError(
            f"{ranks} ranks have use for 0 to {(ranks - 1) * num_experts} copies of a layer's experts, got {redundant}",
            "num_redundant_experts",
        )
    if slots is not None and total > ranks * slots:
        raise ConfigError(
            f"{ranks} ranks have {slots} slots each for {total} experts of a layer; possible: {-(-total // slots)} ranks or more",
            "data_parallel_size",
        )
    return [total // ranks + (rank < total % ranks) for rank in range(ranks)]


def _regroup_layer(layer: Layer, num_experts: int, sizes: list[int]) -> Layer:
    held = [list(experts) for experts in layer[: len(sizes)]]
    held += [[] for _ in range(len(sizes) - len(held))]
    # Ranks with the most experts get the largest sizes.
    order = sorted(range(len(sizes)), key=lambda rank: (-len(held[rank]), rank))
    room = dict(zip(order, sizes, strict=True))
    copies = [0] * num_experts
    for experts in held:
        for expert in experts:
            copies[expert] += 1
    for rank, experts in enumerate(held):
        while len(experts) > room[rank]:
            _drop(experts, copies)
    _make_room(held, copies, sum(sizes))
    for expert in [expert for expert in range(num_experts) if not copies[expert]]:
        _give(expert, held, room, copies)
    while short := [rank for rank, experts in enumerate(held) if len(experts) < room[rank]]:
        rank = short[0]
        _give(min(set(range(num_experts)) - {*held[rank]}, key=lambda e: (copies[e], e)), held, {rank: room[rank]}, copies)
    return tuple(tuple(sorted(experts)) for experts in held)


def _drop(experts: list[int], copies: list[int]) -> None:
    """Drops the expert with the most copies elsewhere."""
    expert = max(experts, key=lambda e: (copies[e], e))
    experts.remove(expert)
    copies[expert] -= 1


def _make_room(held: list[list[int]], copies: list[int], total: int) -> None:
    """Drops copies until there is room for every expert that has none."""
    while sum(map(len, held)) + copies.count(0) > total:
        _drop(max((experts for experts in held if any(copies[e] > 1 for e in experts)), key=len), copies)


def _give(expert: int, held: list[list[int]], room: dict[int, int], copies: list[int]) -> None:
    """Gives the expert to the rank with the most room."""
    rank = max(room, key=lambda r: (room[r] - len(held[r]), -r))
    assert len(held[rank]) < room[rank]
    held[rank].append(expert)
    copies[expert] += 1
