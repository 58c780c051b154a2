"""Masked rows, wherever they are sampled: on the host or by a device, by native kernels or by torch."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from starling_engine.models.decoder import Decoder
from starling_engine.native import load, reference
from starling_engine.sampling import select
from starling_engine.step import StepMasks, StepPlan, StepResult
from starling_engine.worker import masks
from starling_engine.worker.host.batch import Samples
from starling_engine.worker.host.sampler import NO_TOKEN, NOT_FINITE
from starling_engine.worker.masks import NO_MASK, MaskQueue, StepMasking

from tests.engine.bitmasks import VOCABS, check_masks, words_of
from tests.engine.checkpoints import VARIANTS, Reference, make_reference
from tests.engine.late_device import use_late_device
from tests.engine.masked_worker import (
    GREEDY,
    MaskedWorker,
    check_drafts,
    check_impossible_rows,
    check_logprobs,
    errors_of,
    tokens_of,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("checkpoint"), VARIANTS["llama3.1"])


@pytest.fixture(scope="module", params=["host", "host-torch", "device", "device-torch"])
def worker(request: pytest.FixtureRequest, model: Reference) -> Iterator[MaskedWorker]:
    """Samples where and how the parameter says, in all tests: on a device, it records its steps first, which takes seconds."""
    where, _, how = request.param.partition("-")
    if how != "torch" and load() is None:
        pytest.skip("this machine has no native kernels")
    with pytest.MonkeyPatch.context() as patch:
        if how == "torch":
            patch.setattr(select, "load", lambda: None)
        if where == "device":
            use_late_device(patch.setattr, recorded=True)
        yield MaskedWorker(model.folder)


def test_a_row_without_a_possible_token_ends_alone(worker: MaskedWorker, model: Reference) -> None:
    check_impossible_rows(worker, model)


def test_log_probabilities_are_those_before_the_mask(worker: MaskedWorker, model: Reference) -> None:
    check_logprobs(worker, model)


def test_masks_behind_drafts(worker: MaskedWorker, model: Reference) -> None:
    check_drafts(worker, model)


def test_a_row_whose_mask_does_not_come_ends_alone(worker: MaskedWorker, model: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.prefill(model.prompt, [GREEDY] * 3, {})
    result = worker.decode([0, 1, 2], {1: [[7]]}, masked=[0, 1])
    assert errors_of(result) == {0: NO_MASK} and tokens_of(result) == [[], [7], [model.tokens[1]]]
    monkeypatch.setattr(masks, "MASK_SECONDS", 0.01)
    result = worker.decode([1, 2], {}, masked=[0])
    assert errors_of(result) == {0: NO_MASK} and tokens_of(result) == [[], [model.tokens[2]]]


def test_a_broken_model_is_not_taken_for_a_mask(worker: MaskedWorker, model: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = Decoder.logits

    def broken(self: Decoder, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        found = logits(self, hidden, out)
        found[:, 77] = torch.nan
        return found

    monkeypatch.setattr(Decoder, "logits", broken)
    result = worker.prefill(model.prompt, [GREEDY] * 3, {0: [77, 78], 1: [78], 2: []})
    assert errors_of(result) == {0: NOT_FINITE, 2: NO_TOKEN} and tokens_of(result) == [[], [78], []]


@pytest.mark.parametrize("vocab", VOCABS)
def test_the_reference_forbids_what_the_mask_does_not_allow(vocab: int) -> None:
    check_masks(reference.apply_token_bitmask, vocab, torch.device("cpu"))


def test_masks_go_to_the_samples_of_their_rows() -> None:
    """Rows 0, 2, 5 and 6 are sampled from; masks of an earlier step, which failed, are dropped."""
    drafts = np.array([0, 2, 1, 0])
    first, nothing = np.array([0, 1, 4, 6]), np.zeros(7, np.int64)
    samples = Samples([0, 2, 5, 6], first, drafts, nothing, nothing, nothing)
    source, result = MaskQueue(), StepResult(4, 0)
    source.put(StepMasks(3, [0], b"\0\0\0\0"))
    words = words_of(torch.rand(6, 70) < 0.5)
    source.put(StepMasks(4, [5, 0, 2], words.numpy().tobytes()))
    masked = StepMasking(source).of(StepPlan(4, 0, [], [], [], [], masked=[0, 2, 5, 6]), samples, result)
    assert masked is not None and masked.at.tolist() == [4, 5, 0, 1, 2, 3]
    assert torch.equal(torch.from_numpy(masked.words.copy()), words)
    assert errors_of(result) == {6: NO_MASK}


def test_masks_of_rows_that_are_not_sampled_from_are_a_fault() -> None:
    nothing = np.zeros(1, np.int64)
    samples = Samples([1], nothing, nothing, nothing, nothing, nothing)
    for row in (0, 2):
        with pytest.raises(AssertionError, match="no token is sampled"):
            samples.of([row])
