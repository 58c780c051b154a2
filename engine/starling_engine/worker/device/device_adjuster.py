"""Adjusts logits on a device: a request is entered once, and the device counts its sampled tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from starling_engine.kernels.token_words import ONE
from starling_engine.params import MAX_LOGIT_BIAS
from starling_engine.platforms.device_queue import DeviceQueue
from starling_engine.sampling.adjust import Adjuster
from starling_engine.sampling.select import select_adjust_op
from starling_engine.worker.device.pinned import send


class DeviceAdjuster:
    """Adjusts the logits of `rows` slots, and of one more for padding. The first request that needs memory takes it for all."""

    def __init__(self, queue: DeviceQueue, device: torch.device, rows: int, vocab_size: int) -> None:
        self._queue = queue
        self._device = device
        self._shape = rows + 1, vocab_size
        self._op = select_adjust_op(device)
        self._words: torch.Tensor | None = None
        """[rows + 1, vocab_size] int32; slots without such a request are undefined."""
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None
        """Tokens [rows + 1, MAX_LOGIT_BIAS] int64, and the bias of their logits, fp32; both padded with zeros."""

    def enter(self, slot: int, adjuster: Adjuster, tokens: list[int]) -> None:
        """Enters a request. `tokens` are its prompt and its output so far."""
        self._words_of_all()[slot].copy_(self._send(adjuster.words(self._shape[1], tokens)))
        if adjuster.bias or self._bias is not None:
            both = np.zeros((2, MAX_LOGIT_BIAS))
            both[:, : len(adjuster.bias)] = list(adjuster.bias), list(adjuster.bias.values())
            sent = self._send(both)
            for table, row in zip(self._bias_of_all(), sent, strict=True):
                table[slot].copy_(row)

    def adjust(
        self, logits: torch.Tensor, at: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor, adjusters: Sequence[Adjuster]
    ) -> torch.Tensor:
        """Returns [R, vocab_size]: rows `at` [R] of logits [N, vocab_size] fp32, adjusted for the requests in `slots` [R].

        `ends` [R] is the position of the token to sample, and `adjusters` has each row's.
        """
        settings = self._send(np.array([adjuster.settings for adjuster in adjusters]))
        below_min_tokens = ends < settings[:, 3]
        adjusted = self._op(logits, at, self._words_of_all(), slots, settings[:, :3].float().contiguous(), below_min_tokens)
        if any(adjuster.bias for adjuster in adjusters):
            tokens, values = (table.index_select(0, slots) for table in self._bias_of_all())
            adjusted.scatter_add_(1, tokens, values)
        return adjusted

    def count(self, slots: torch.Tensor, tokens: torch.Tensor, times: torch.Tensor) -> None:
        """Counts `tokens` [R] as output of these slots, each as often as `times` [R] int32 says: also less often."""
        words = self._words_of_all()
        words.view(-1).index_add_(0, slots * words.shape[1] + tokens, ONE * times)

    def forget(self) -> None:
        """Gives the memory back, while there are no requests."""
        self._words = self._bias = None

    def _words_of_all(self) -> torch.Tensor:
        if self._words is None:
            self._words = torch.empty(self._shape, dtype=torch.int32, device=self._device)
        return self._words

    def _bias_of_all(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._bias is None:
            tokens = torch.zeros(self._shape[0], MAX_LOGIT_BIAS, dtype=torch.int64, device=self._device)
            self._bias = tokens, torch.zeros_like(tokens, dtype=torch.float32)
        return self._bias

    def _send(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return send(self._queue, array, self._device)
