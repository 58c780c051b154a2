"""The part of a group of several nodes that runs on one of them. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """One node's part.

    host    this node's address: its cores listen there for the other nodes' frontends
    cores   data parallel ranks whose engine cores run here; none where only workers do
    ranks   ranks that run here and so share the machine, those of other nodes' cores included
    """

    host: str
    cores: tuple[int, ...]
    ranks: int
