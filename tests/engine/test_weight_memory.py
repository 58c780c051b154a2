"""Memory for packed weights: matrices side by side on huge pages, from any thread."""

from concurrent.futures import ThreadPoolExecutor

import torch
from starling_engine.native.weight_memory import HUGE_PAGE, LINE, PIECE, WeightMemory


def test_matrices_lie_side_by_side_and_share_nothing() -> None:
    memory = WeightMemory()
    shapes = [(3, 5), (1000, 700), (1, 1), (64, 64)] * 20
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda shape: memory.empty(shape, torch.bfloat16), shapes))
    for number, tensor in enumerate(found):
        tensor.fill_(number)
    assert all((tensor == number).all() and tensor.shape == shapes[number] for number, tensor in enumerate(found))
    assert all(tensor.data_ptr() % LINE == 0 and tensor.is_contiguous() for tensor in found)
    total, largest = sum(tensor.nbytes for tensor in found), max(tensor.nbytes for tensor in found)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) <= 1 + total // (PIECE - largest)


def test_a_large_matrix_has_its_own() -> None:
    memory = WeightMemory()
    memory.empty((10, 10), torch.uint8)
    large = memory.empty((PIECE, 2), torch.uint8)
    assert large.data_ptr() % HUGE_PAGE == 0
    assert memory.empty((10, 10), torch.uint8).untyped_storage().data_ptr() != large.untyped_storage().data_ptr()


def test_memory_that_was_given_back_is_not_given_again() -> None:
    """An engine that sleeps resizes the storages of its weights."""
    memory = WeightMemory()
    memory.empty((10, 10), torch.uint8).untyped_storage().resize_(0)
    memory.empty((10, 10), torch.uint8).fill_(1)
