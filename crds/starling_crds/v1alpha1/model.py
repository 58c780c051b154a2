"""`spec.model`: which weights, where they come from and where they are kept."""

from typing import Literal

from pydantic import Field
from starling_crds.v1alpha1.base import ApiModel


class SecretKey(ApiModel):
    """One key of a Secret in the service's namespace."""

    name: str = Field(min_length=1, max_length=253, description="Name of the Secret.")
    key: str = Field(min_length=1, max_length=253, description="Key in the Secret's data.")


class WeightsCache(ApiModel):
    """Where downloaded weights are kept. Without it: an emptyDir, which a new pod fills again."""

    claim: str | None = Field(default=None, max_length=253, description="Name of a PersistentVolumeClaim in this namespace.")
    host_path: str | None = Field(
        default=None,
        pattern=r"^/.+",
        max_length=1024,
        description="Absolute folder on each node, shared by its pods; needs a namespace that allows hostPath volumes.",
    )
    size_limit: str | None = Field(
        default=None, description="Limit of the emptyDir, such as 50Gi; only without claim and hostPath."
    )


class ModelSpec(ApiModel):
    """The model to serve."""

    source: str = Field(
        max_length=1024,
        description=(
            "hf://org/name[@revision] is downloaded from the Hugging Face hub, pvc://claim/path is read from a"
            " PersistentVolumeClaim of this namespace, file:///path from the agent's own file system."
        ),
    )
    served_names: list[str] = Field(
        default_factory=list,
        max_length=16,
        description="Names that requests may give as `model`; the first is the one in answers. Default: the service's name.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Type of weights and activations; auto takes the checkpoint's."
    )
    max_length: int | None = Field(
        default=None, ge=1, le=16_777_216, description="Longest prompt plus output in tokens. Default: the model's own."
    )
    trust_remote_code: bool = Field(
        default=False, description="Whether code in the model's repository may run. This release runs none; true is refused."
    )
    token_secret: SecretKey | None = Field(default=None, description="Secret key with the hub's access token.")
    pull_secrets: list[str] = Field(
        default_factory=list, max_length=8, description="Names of image pull Secrets in this namespace."
    )
    cache: WeightsCache = Field(default_factory=WeightsCache, description="Where downloaded weights are kept on each node.")
