"""Chooses the op that samples."""

import torch


def select_sample_op(device: torch.device):  # type: ignore[no-untyped-def]
    def greedy(logits, *rest):  # type: ignore[no-untyped-def]
        return logits.argmax(dim=-1)

    return greedy
