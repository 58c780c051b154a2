"""Dense modules of sentence-transformers, which vectors pass behind their pooling. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from starling_engine.model_config.fields import Fields

_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "Sigmoid": "sigmoid"}
"""Names of activations here, by the class in torch."""
MAX_FEATURES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ProjectionConfig:
    """activation(W x + b), with the tensors `linear.weight` and `linear.bias` in the files of `folder`, below the model's."""

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str


def read_projection(path: Path, features: str) -> ProjectionConfig | str:
    """Reads the config of a module in the folder `path`; returns why it is not supported, where it is not.

    `features` is the name of what it takes and gives.
    """
    config = Fields.read(path / "config.json")
    name = config.text("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if name not in _ACTIVATIONS:
        return f"activation_function {name!r} (possible: {', '.join(_ACTIVATIONS)})"
    if config.boolean("use_residual", False):
        return "use_residual"
    taken = config.text("module_input_name", features)
    names = [taken, config.text("module_output_name", taken)]
    if names != [features] * 2:
        return f"module_input_name and module_output_name {names}"
    return ProjectionConfig(
        folder=path.name,
        in_features=config.integer("in_features", high=MAX_FEATURES),
        out_features=config.integer("out_features", high=MAX_FEATURES),
        bias=config.boolean("bias", True),
        activation=_ACTIVATIONS[name],
    )
