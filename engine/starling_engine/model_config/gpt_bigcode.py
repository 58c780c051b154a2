"""StarCoder 1 and SantaCoder (GPT-BigCode, arXiv 2305.06161): GPT-2 with one key-value head.

Its matrices have a row for each output.
"""

from dataclasses import replace

from starling_engine.model_config.fields import Fields
from starling_engine.model_config.gpt2 import GPT2, gpt2_traits
from starling_engine.model_config.traits import Traits


def _traits(config: Fields) -> Traits:
    config.only("multi_query", True)
    return gpt2_traits(config)


def _kv_heads(_config: Fields, _num_heads: int) -> int:
    return 1


GPT_BIGCODE = replace(
    GPT2,
    architecture="GPTBigCodeForCausalLM",
    traits=_traits,
    kv_heads=_kv_heads,
    activation_names={"gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"},  # the same formula
    defaults={"hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 1024},
    names=replace(GPT2.names, transposed=False),
)
