"""Arguments of speculative decoding: what each spelling means, and what is said of what is not possible."""

from typing import Any

import pytest
from starling_engine import EngineArgs
from starling_engine.args import speculative_of
from starling_engine.config import SpeculativeConfig
from starling_engine.errors import ConfigError


@pytest.mark.parametrize(
    "arguments",
    [
        {"spec_method": "ngram", "spec_tokens": 5},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5}},
        {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 5}'},
    ],
)
def test_each_spelling_means_the_same(arguments: dict[str, Any]) -> None:
    assert speculative_of(EngineArgs(model="m", **arguments)) == SpeculativeConfig(method="ngram", num_speculative_tokens=5)


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "mtp", "medusa", 5])
def test_another_method_is_refused_before_its_settings(method: Any) -> None:
    config = {"method": method, "model": "m", "draft_tensor_parallel_size": 1, "rejection_sample_method": "standard"}
    with pytest.raises(ConfigError, match=r"speculative_config: method: .* is not supported; possible: ngram, suffix$"):
        EngineArgs(model="m", speculative_config=config)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_are_accepted_by_rejection_sampling_and_in_no_other_way(method: str) -> None:
    config = {"method": method, "rejection_sample_method": "standard"}
    assert speculative_of(EngineArgs(model="m", speculative_config=config)) == SpeculativeConfig(method=method)
    for other in ("block", "synthetic", None, []):
        with pytest.raises(ConfigError, match=r"^speculative_config: rejection_sample_method: possible is standard, got .* single"):
            EngineArgs(model="m", speculative_config={**config, "rejection_sample_method": other})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_speculative_tokens": 5}, "needs a method: ngram or suffix"),
        ({"model": "m"}, "needs a method: ngram or suffix"),
        ("ngram", "must be a JSON object, got 'ngram'"),
        ("[]", "must be a JSON object"),
        ({"method": "ngram", "draft_model": "m"}, "has no 'draft_model' here; possible: method, num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": "5"}, "num_speculative_tokens: expected `int`, got `str`"),
        ({"method": "ngram", "num_speculative_tokens": 33}, r"num_speculative_tokens must be in \[1, 32\], got 33"),
        ({"method": "ngram", "prompt_lookup_min": 6}, r"prompt_lookup_min must be at most prompt_lookup_max \(5\)"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2.0}, r"suffix_decoding_min_token_prob must be in \[0.0, 1.0\]"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^speculative_config: {message}"):
        EngineArgs(model="m", speculative_config=config)


def test_two_spellings_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="speculative_config: says the same as spec_method and spec_tokens"):
        EngineArgs(model="m", spec_method="ngram", speculative_config={"method": "ngram"})
