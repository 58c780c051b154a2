"""`spec.model`: which weights, where they come from and where they are kept."""

from typing import Annotated, Literal

from pydantic import Field
from starling_crds.rules import Rule, look_up
from starling_crds.v1alpha1.base import ApiModel
from starling_crds.v1alpha1.engine_arguments import EngineArgument
from starling_crds.v1alpha1.strings import AbsolutePath, ClassifierTokens, DataKey, ModelName, ModelSource, ObjectName, Size


class SecretKey(ApiModel):
    """One key of a Secret in the service's namespace."""

    name: ObjectName = Field(description="Name of the Secret.")
    key: DataKey = Field(description="Key in the Secret's data.")


class WeightsCache(ApiModel):
    """Volume that keeps downloaded weights: a claim or a hostPath; else an emptyDir, and each new pod downloads them again."""

    RULES = (
        Rule(
            field="hostPath",
            cel="!(has(self.claim) && has(self.hostPath))",
            holds=lambda cache: cache.claim is None or cache.host_path is None,
            message="at most one of claim and hostPath is possible; remove claim ({claim}) or hostPath ({hostPath})",
        ),
        Rule(
            field="sizeLimit",
            cel="!has(self.sizeLimit) || !(has(self.claim) || has(self.hostPath))",
            holds=lambda cache: cache.size_limit is None or (cache.claim is None and cache.host_path is None),
            message="limits the emptyDir and is only possible without claim and hostPath; remove sizeLimit ({sizeLimit}) or those",
        ),
    )

    claim: ObjectName | None = Field(default=None, description="Name of a PersistentVolumeClaim in this namespace.")
    host_path: AbsolutePath | None = Field(
        default=None,
        description="Absolute folder on each node, shared by its pods; needs a namespace that allows hostPath volumes.",
    )
    size_limit: Size | None = Field(
        default=None, description="Limit of the emptyDir, such as 50Gi; only without claim and hostPath."
    )


DISTINCT = Rule(
    cel="self.all(name, self.exists_one(other, other == name))",
    holds=lambda names: len(set(names)) == len(names),
    message="must name each model once; remove what is there twice",
)


def _only_for_downloads(field: str) -> Rule:
    """Refuses a field that only downloads use where the source is no download, rather than ignore it."""
    outer = "" if "." not in field else f"has(self.{field.partition('.')[0]}) && "
    return Rule(
        field=field,
        cel=f"self.source.startsWith('hf://') || !({outer}has(self.{field}))",
        holds=lambda model: model.source.startswith("hf://") or look_up(model, field) is None,
        message="is only for models that are downloaded (hf://org/name); remove it, or change source ({source})",
    )


class ModelSpec(ApiModel):
    """The model to serve."""

    RULES = tuple(_only_for_downloads(field) for field in ("tokenSecret", "cache.claim", "cache.hostPath", "cache.sizeLimit"))

    source: Annotated[ModelSource, EngineArgument("model"), EngineArgument("revision")] = Field(
        description=(
            "hf://org/name[:file.gguf][@revision] is downloaded from the Hugging Face hub, pvc://claim/path is read from a"
            " PersistentVolumeClaim of this namespace, file:///path from the agent's own file system."
            " A path is that of a folder or of a GGUF file."
        ),
    )
    served_names: Annotated[list[ModelName], DISTINCT] = Field(
        default_factory=list,
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description="Names that requests may give as `model`; the first is the one in answers. Default: the service's name.",
    )
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], EngineArgument("dtype")] = Field(
        default="auto", description="Type of weights and activations; auto takes the checkpoint's."
    )
    max_length: Annotated[int | None, EngineArgument("max_model_len")] = Field(
        default=None, ge=1, le=16_777_216, description="Longest prompt plus output in tokens. Default: the model's own."
    )
    classifier_from_token: Annotated[ClassifierTokens | None, EngineArgument("classifier_from_token")] = Field(
        default=None,
        description=(
            "Tokens whose logits are the score of a reranker that is a language model: no,yes for Qwen3-Reranker. The last one is"
            " the positive answer, and the only one for some models. Checkpoints with sentence-transformers' files need it not."
        ),
    )
    trust_remote_code: bool = Field(
        default=False, description="Whether code in the model's repository may run. This release runs none; true is refused."
    )
    token_secret: SecretKey | None = Field(default=None, description="Secret key with the hub's access token.")
    pull_secrets: list[ObjectName] = Field(
        default_factory=list,
        max_length=8,
        json_schema_extra={"x-kubernetes-list-type": "set"},
        description="Names of image pull Secrets in this namespace.",
    )
    cache: WeightsCache = Field(default_factory=WeightsCache, description="Where downloaded weights are kept on each node.")
