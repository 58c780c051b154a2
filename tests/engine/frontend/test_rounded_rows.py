"""What it costs to round activations to FP8, as GPUs do: the repository's own model in transformers, with our rule in torch."""

import pytest
import torch
from starling_engine.kernels.rounded_rows import RowRounding, rounded_in_torch
from starling_engine.model_config.quantization import Rounding
from starling_engine.native.group_quantized import FP8, quantize
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.engine.frontend.test_quantization import TEXT
from tests.engine.real_engine import MODEL

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def plain() -> float:
    return surprise(load())


def load() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return model.eval()


def surprise(model: PreTrainedModel) -> float:
    """Returns the mean of -log p of the text's tokens, in nats."""
    ids = torch.tensor([AutoTokenizer.from_pretrained(MODEL)(TEXT)["input_ids"]])
    with torch.no_grad():
        return F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]).item()


@pytest.mark.parametrize(("kind", "bound"), [("token", 0.02), ("group", 0.04)])
def test_the_model_stays_as_good(kind: Rounding, bound: float, plain: float) -> None:
    """Weights are rounded, too, as `--quantization fp8` does."""
    model, rounding, seen = load(), RowRounding(kind), 0
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "layers" in name:
            module.weight.data = quantize(module.weight.data, FP8).dequantized()
            module.register_forward_pre_hook(lambda _, args: rounded_in_torch(args[0].flatten(0, 1), rounding).numbers()[None])
            seen += 1
    found = surprise(model)
    assert seen > 10 and 1e-6 < abs(found - plain) < bound
