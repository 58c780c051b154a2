"""Penalties on the device against those of the host, and how they compile."""

import torch
from starling_engine.kernels import penalties
from starling_engine.params import SamplingParams
from starling_engine.sampling.adjust import Adjuster

from .compiled import compiled

ASKED = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(presence_penalty=0.5, frequency_penalty=-0.25),
    SamplingParams(repetition_penalty=0.8, presence_penalty=-1.0, frequency_penalty=0.5),
    SamplingParams(frequency_penalty=1.0),
]
LENGTHS = [(5, 9), (1500, 1600), (3, 1100), (4, 4), (0, 0)]
"""Tokens of the prompt, and of prompt and output. Some are longer than what one program counts."""


def test_penalties_are_the_host_s(device: torch.device) -> None:
    vocab, rows = 5000, len(ASKED)
    torch.manual_seed(0)
    logits, tokens = 4 * torch.randn(rows, vocab), torch.randint(0, vocab, (rows, 2000)).int()
    tokens[:, 2:1000:3] = 17
    tokens[1, 0] = tokens[1, 1]
    expected = logits.clone()
    for row, history, params, (prompt, length) in zip(expected, tokens, ASKED, LENGTHS, strict=True):
        Adjuster(params, prompt, ()).adjust(row, history[:length].numpy())
    tokens[1, 0] = 1 << 20  # a placeholder of what is no text

    actual, counts = logits.to(device), torch.zeros(rows, vocab, dtype=torch.int32, device=device)
    lengths = [torch.tensor(column, dtype=torch.int32, device=device) for column in zip(*LENGTHS, strict=True)]
    asked = [
        torch.tensor([getattr(params, f"{name}_penalty") for params in ASKED], device=device)
        for name in ("repetition", "presence", "frequency")
    ]
    penalties.penalise(actual, tokens.to(device), *lengths, *asked, counts)
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert not counts.any()


def launch() -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    ints = [empty(64, 40_960, dtype=torch.int32), *(empty(64, dtype=torch.int32) for _ in range(2))]
    penalties.penalise(empty(64, 151_936), *ints, *(empty(64) for _ in range(3)), empty(64, 151_936, dtype=torch.int32))


def test_compiles_without_spills_and_reads_counts_by_16_bytes() -> None:
    count, change = compiled(launch)
    assert (count.name, change.name) == ("_count", "_penalise")
    assert count.stack == change.stack == 0
    assert change.ptx.count("ld.global.v4.b32") == 4
