"""Writes checkpoints of many families as GGUF files, by the rules of llama.cpp's converter (its conversion/*.py), for tests alone.

`gguf_files.py` writes those of Llama and Qwen, and has the quantizers. Here tensors have the names of the package `gguf`.
The file is long because it is one table of rules, with what they need.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.engine.gguf_files import _PROJECTIONS, _add, _in_pairs, _llama3_factors, _write_tokenizer

PAIRED = ("mistral3", "smollm3", "granite", "granitemoe", "granitehybrid", "arcee")
ONE_ADDED = ("gemma", "gemma2", "gemma3", "gemma-embedding", "qwen3next", "qwen35", "qwen35moe", "nemotron")
MAMBA2 = ("mamba2", "granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe")
IN_FLOATS = ("gate_inp", "ssm_conv1d", "ssm_a", "ssm_d", "_norm", "shortconv.conv")
"""Parts of names of matrices that are never quantized."""
ARCHITECTURES = {
    "gemma3_text": "gemma3", "gpt_oss": "gpt-oss", "granitemoeshared": "granitemoe", "granitemoehybrid": "granitehybrid",
    "qwen2_moe": "qwen2moe", "qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "olmo3": "olmo2",
    "lfm2_moe": "lfm2moe", "glm4_moe": "glm4moe", "ernie4_5_moe": "ernie4_5-moe", "cohere": "command-r", "falcon_h1": "falcon-h1",
    "bamba": "granitehybrid", "deepseek_v32": "deepseek32", "glm_moe_dsa": "glm-dsa",
    "hunyuan_v1_dense": "hunyuan-dense", "hunyuan_v1_moe": "hunyuan-moe",
    "minimax_m2": "minimax-m2", "gemma4_text": "gemma4",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), "deepseek2"),
    "llama4_text": "llama4", "ministral3": "mistral3", "kimi_linear": "kimi-linear", "qwen3_moe": "qwen3moe",
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "distilbert"), "bert"),
    "phi": "phi2", "gpt_neox": "gptneox",
    "nomic_bert": "nomic-bert", "jina_embeddings_v3": "jina-bert-v3", "modernbert": "modern-bert",
}  # fmt: skip
"""Architectures by transformers' model types; the others have the same name."""
Rule = Callable[[Any], dict[str, Any]]


def convert(
    path: Path,
    folder: Path,
    choose: Callable[[str], str] = lambda _: "F32",
    architecture: str = "",
    split_max_tensors: int = 0,
) -> None:
    """Writes the checkpoint in `folder`. `choose` names a matrix's type, `architecture` another name than its own.

    With `split_max_tensors` there are several files, of so many tensors each.
    """
    config = AutoConfig.from_pretrained(folder)
    config.allow_global_per_layer_attribute_access = True  # where layers differ, a rule reads each
    kind = config.model_type
    name = architecture or ARCHITECTURES.get(kind, kind)
    if name == "gemma3" and config.use_bidirectional_attention:
        name = "gemma-embedding"
    if name == "nemotron_h" and "moe" in config.layers_block_type:
        name = "nemotron_h_moe"
    writer = gguf.GGUFWriter(path, name, split_max_tensors=split_max_tensors)
    fields = {**_fields(config), **{key: value for rule in _RULES.get(name, ()) for key, value in rule(config).items()}}
    for key, value in fields.items():
        _write(writer, f"{name}.{key}", value)
    if (folder / "tokenizer.json").exists():
        _write_tokenizer(writer, folder, config.vocab_size, "qwen2")
    stored = load_file(folder / "model.safetensors")
    for part in ("alpha_n", "alpha_p", "beta", "eps") if name == "apertus" else ():
        numbers = [stored[f"model.layers.{at}.mlp.act_fn.{part}"].item() for at in range(config.num_hidden_layers)]
        writer.add_array(f"xielu.{part}", numbers)
    for target, tensor in _tensors(stored, config, name):
        small = tensor.dim() < 2 or target.endswith("bias") or any(part in target for part in IN_FLOATS)
        _add(writer, target, tensor.float().contiguous().numpy(), "F32" if small else choose(target))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Writes a value; None is left out, and of a list that is the same for all layers, one number is written."""
    match value:
        case [int(first), *_] if isinstance(value, list) and "pattern" not in key:
            writer.add_uint32(key, first)
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list() | tuple():
            writer.add_array(key, value)


def _first(config: Any, *names: str) -> Any:
    return next((found for name in names if (found := getattr(config, name, None)) is not None), None)


def _fields(config: Any) -> dict[str, Any]:
    """Returns what the converter's base class writes. None is not written."""
    rope = _first(config, "rope_parameters") or {}
    full = rope.get("full_attention", rope)
    heads, kv_heads, head_dim = (_first(config, name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    partial = full.get("partial_rotary_factor")
    width = head_dim or (config.hidden_size // heads if heads else None)
    return {
        "vocab_size": config.vocab_size,
        "block_count": _first(config, "num_hidden_layers"),
        "context_length": _first(config, "max_position_embeddings") or 1 << 20,
        "embedding_length": config.hidden_size,
        "feed_forward_length": _first(config, "intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(full["rope_theta"]) if "rope_theta" in full else None,
        "rope.dimension_count": int(width * partial) if partial else None,
        "attention.layer_norm_rms_epsilon": _first(config, "rms_norm_eps"),
        "attention.layer_norm_epsilon": _first(config, "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon"),
        "attention.sliding_window": _first(config, "sliding_window"),
        "rope.scaling.type": {"linear": "linear", "yarn": "yarn"}.get(full.get("rope_type", "")),
        "rope.scaling.factor": float(full["factor"]) if full.get("rope_type") in ("linear", "yarn") else None,
        "rope.scaling.original_context_length": full.get("original_max_position_embeddings"),
        "rope.scaling.yarn_attn_factor": full.get("attention_factor") if full.get("rope_type") == "yarn" else None,
        "rope.scaling.yarn_beta_fast": full.get("beta_fast") and float(full["beta_fast"]),
        "rope.scaling.yarn_beta_slow": full.get("beta_slow") and float(full["beta_slow"]),
        "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]) if "sliding_attention" in rope else None,
    }


def _experts(config: Any) -> dict[str, Any]:
    """Returns the fields of experts, of which a model of this architecture may have none, in any of its layers."""
    count = _first(config, "n_routed_experts", "moe_num_experts", "num_local_experts", "num_experts")
    plain = (_first(config, "first_k_dense_replace") or 0) >= config.num_hidden_layers
    return {
        "expert_count": None if plain else count or None,
        "expert_used_count": _first(config, "num_experts_per_tok", "moe_k", "moe_topk"),
        "expert_feed_forward_length": _first(config, "moe_intermediate_size", "intermediate_size"),
        "expert_shared_feed_forward_length": _first(
            config, "shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"
        ),
        "expert_shared_count": _first(config, "n_shared_experts", "moe_num_shared_experts"),
        "leading_dense_block_count": _leading(config),
        "expert_weights_scale": _first(config, "routed_scaling_factor"),
        "expert_weights_norm": _first(config, "norm_topk_prob"),
        "expert_group_count": _first(config, "n_group"),
        "expert_group_used_count": _first(config, "topk_group"),
    }


def _leading(config: Any) -> int | None:
    """Returns how many layers come before those with experts."""
    found: int | None = _first(config, "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    kinds = _first(config, "mlp_layer_types")
    return kinds.index("sparse") if found is None and kinds else found


def _latents(config: Any) -> dict[str, Any]:
    """Returns the sizes of latents; of heads in place of these, of a file as it was before 2025-04 (`unsplit`).

    Of V3 no file says how experts are scored, as none did at first; of V3 with YaRN, GLM and Kimi they do.
    """
    rank, rotated, unsplit = config.kv_lora_rank, config.qk_rope_head_dim, _first(config, "unsplit")
    width, values = config.qk_nope_head_dim + rotated, config.v_head_dim
    scale = (_first(config, "rope_parameters") or {}).get("mscale_all_dim")
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": json.loads(Path(config.name_or_path, "config.json").read_text()).get("q_lora_rank"),
        "attention.kv_lora_rank": rank,
        "attention.key_length": width if unsplit else rank + rotated,
        "attention.value_length": values if unsplit else rank,
        "attention.key_length_mla": None if unsplit else width,
        "attention.value_length_mla": None if unsplit else values,
        "rope.dimension_count": rotated,
        "rope.scaling.yarn_log_multiplier": 0.1 * scale if scale else None,
        "expert_gating_func": _score(config),
    }


def _score(config: Any) -> int | None:
    """Returns llama.cpp's number for the function that scores experts."""
    if config.model_type in ("deepseek_v2", "mistral4"):
        return 1
    is_old = config.model_type == "deepseek_v3" and config.rope_parameters.get("rope_type") != "yarn"
    return None if is_old else 2


def _indexer(config: Any) -> dict[str, Any]:
    kinds = _first(config, "indexer_types") if config.model_type == "glm_moe_dsa" else None
    return {
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_topk,
        "attention.indexer.types": tuple(kind == "full" for kind in kinds) if kinds else None,
    }


def _granite_hybrid(config: Any) -> dict[str, Any]:
    """Returns the fields of Granite 4, which is not rotated, or of Bamba, which has no multipliers."""
    is_bamba = config.model_type == "bamba"
    written = json.loads(Path(config.name_or_path, "config.json").read_text())
    attending = (
        written["attn_layer_indices"] if is_bamba else [at for at, kind in enumerate(written["layer_types"]) if kind == "attention"]
    )
    heads = tuple(config.num_key_value_heads if at in attending else 0 for at in range(config.num_hidden_layers))
    own = {} if is_bamba else {**_multipliers(config), "rope.freq_base": None}
    return {**own, "rope.scaling.finetuned": is_bamba, "attention.head_count_kv": heads}


def _images(config: Any) -> dict[str, Any]:
    """Returns what Qwen's models with images have: parts of rotated pairs for time, height and width; of Qwen 3 also layers."""
    part = config.head_dim // 8 if _first(config, "head_dim") else config.hidden_size // config.num_attention_heads // 8
    return {"rope.dimension_sections": (part * 2, part, part, 0)}


def _deep(_config: Any) -> dict[str, Any]:
    return {"n_deepstack_layers": 3}


def _kimi(config: Any) -> dict[str, Any]:
    return {
        "attention.head_count_kv": tuple(int(kind == "full_attention") for kind in config.layer_types),
        "kda.head_dim": config.linear_head_dim,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "expert_group_count": None,
    }


def _llama4(config: Any) -> dict[str, Any]:
    return {
        "feed_forward_length": config.intermediate_size_mlp,
        "expert_feed_forward_length": config.intermediate_size,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
        "attention.sliding_window": 0 if {*config.layer_types} == {"full_attention"} else None,
    }


def _temperature(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return {
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def _pattern(config: Any) -> dict[str, Any]:
    return {"attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types]}


def _multipliers(config: Any) -> dict[str, Any]:
    return {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "attention.key_length": None,
    }


def _state(config: Any) -> dict[str, Any]:
    heads = _first(config, "mamba_n_heads", "mamba_num_heads", "num_heads")
    width = _first(config, "mamba_d_ssm") or heads * _first(config, "mamba_d_head", "mamba_head_dim", "head_dim")
    return {
        "ssm.conv_kernel": _first(config, "mamba_d_conv", "conv_kernel"),
        "ssm.state_size": _first(config, "mamba_d_state", "ssm_state_size", "state_size"),
        "ssm.group_count": _first(config, "mamba_n_groups", "n_groups"),
        "ssm.inner_size": width,
        "ssm.time_step_rank": heads,
    }


def _mamba(config: Any) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": _first(config, "mamba_d_conv", "conv_kernel"),
        "ssm.state_size": _first(config, "mamba_d_state", "state_size"),
        "ssm.inner_size": _first(config, "mamba_expand", "expand") * config.hidden_size,
        "ssm.time_step_rank": _first(config, "mamba_dt_rank", "time_step_rank"),
    }


def _alone(config: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base"))
    eps = {"attention.layer_norm_rms_epsilon": config.layer_norm_epsilon, "attention.layer_norm_epsilon": None}
    return {**nothing, **eps, "attention.head_count": 0, "feed_forward_length": 0}


def _delta(config: Any) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
    }


def _ntk(config: Any) -> dict[str, Any]:
    """Returns the fields of Hunyuan, whose scaling becomes another base."""
    rope, size = config.rope_parameters, config.head_dim
    return {"rope.freq_base": rope["rope_theta"] * rope["alpha"] ** (size / (size - 2)), "rope.scaling.type": None}


def _long(config: Any) -> dict[str, Any]:
    """Returns the fields of Phi-3, whose factors are tensors."""
    return {"attention.sliding_window": config.sliding_window or 0, "rope.scaling.type": None}


def _encoder(_config: Any) -> dict[str, Any]:
    return {"attention.causal": False, "pooling_type": int(gguf.PoolingType.MEAN), "attention.sliding_window": None}


def _labels(config: Any) -> dict[str, Any]:
    """Returns the labels of a head; the converter takes two of them for transformers' default."""
    return {
        "classifier.output_labels": [config.id2label[at] for at in range(config.num_labels)] if config.num_labels != 2 else None
    }


def _window_as_written(config: Any) -> dict[str, Any]:
    """Returns the window of the config.json; transformers has it on each side."""
    written = json.loads(Path(config.name_or_path, "config.json").read_text())
    return {"attention.sliding_window": written["sliding_window"], "pooling_type": int(gguf.PoolingType.MEAN)}


def _before_positions(config: Any) -> int:
    """Returns how many rows of the table of positions the converter leaves out: those that no token takes."""
    return config.pad_token_id + 1 if config.model_type in ("roberta", "xlm-roberta", "camembert") else 0


def _gemma4(config: Any) -> dict[str, Any]:
    """Returns the fields of Gemma 4, whose layers differ in heads and in widths."""
    written, slides = config.to_dict(), [kind == "sliding_attention" for kind in config.layer_types]
    own = written.get("per_layer_config") or {}
    layers = [{**written, **own.get(str(at), own.get(at, {}))} for at in range(len(slides))]
    shared, width = config.num_kv_shared_layers, config.intermediate_size
    sizes = {at: layer["head_dim"] for at, layer in zip(slides, layers, strict=True)}
    experts = config.enable_moe_block
    return {
        **_pattern(config),
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input or 0,
        **{f"attention.{of}_length": sizes[False] for of in ("key", "value")},
        **{f"attention.{of}_length_swa": sizes[True] for of in ("key", "value")},
        "attention.head_count_kv": tuple(layer["num_key_value_heads"] for layer in layers),
        "feed_forward_length": tuple(width * (1 + (at >= len(slides) - shared)) for at in range(len(slides)))
        if config.use_double_wide_mlp
        else width,
        "rope.dimension_count": sizes[False],
        "rope.dimension_count_swa": sizes[True],
        "final_logit_softcapping": config.final_logit_softcapping,
        "expert_count": config.num_experts if experts else None,
        "expert_used_count": config.top_k_experts if experts else None,
        "expert_feed_forward_length": config.moe_intermediate_size if experts else None,
    }


_RULES: dict[str, tuple[Rule, ...]] = {
    "gemma4": (_gemma4,),
    "deepseek2": (_experts, _latents),
    "mistral4": (_experts, _latents),
    "deepseek32": (_experts, _latents, _indexer),
    "glm-dsa": (_experts, _latents, _indexer),
    "kimi-linear": (_experts, _latents, _kimi),
    "llama4": (_experts, _llama4),
    "mistral3": (_temperature,),
    "qwen2vl": (_images,),
    "qwen3vl": (_images, _deep),
    "qwen3vlmoe": (_experts, _images, _deep),
    "phi2": (lambda c: {"feed_forward_length": 4 * c.hidden_size},),
    "gptneox": (lambda c: {"use_parallel_residual": c.use_parallel_residual, "rope.freq_base": None},),
    "gemma-embedding": (_window_as_written,),
    "bert": (
        _encoder,
        lambda c: {"context_length": c.max_position_embeddings - _before_positions(c)},
        _labels,
        lambda c: {"attention.layer_norm_epsilon": 1e-12} if c.model_type == "distilbert" else {},
    ),
    "nomic-bert": (_encoder,),
    "jina-bert-v3": (_encoder,),
    "eurobert": (_encoder,),
    "modern-bert": (
        _encoder,
        _labels,
        lambda c: {
            "attention.sliding_window": c.local_attention,
            "attention.sliding_window_pattern": 3,
            "attention.layer_norm_epsilon": c.norm_eps,
            "hidden_act": c.hidden_activation,
        },
    ),
    "gemma2": (
        lambda c: {
            "attn_logit_softcapping": c.attn_logit_softcapping,
            "final_logit_softcapping": c.final_logit_softcapping,
        },
    ),
    "gpt-oss": (_experts,),
    "phi3": (_long,),
    "granite": (_multipliers,),
    "granitemoe": (_multipliers, _experts),
    "granitehybrid": (_granite_hybrid, _experts, _state),
    "qwen2moe": (_experts, lambda _: {"attention.sliding_window": None}),
    "qwen3next": (_experts, _delta),
    "qwen35": (_delta,),
    "qwen35moe": (_experts, _delta),
    "lfm2": (
        lambda c: {
            "shortconv.l_cache": c.conv_L_cache,
            "feed_forward_length": -(-int(2 * c.intermediate_size / 3) // c.block_multiple_of) * c.block_multiple_of,
            "attention.layer_norm_rms_epsilon": c.norm_eps,
        },
    ),
    "lfm2moe": (
        _experts,
        lambda c: {
            "shortconv.l_cache": c.conv_L_cache,
            "expert_gating_func": 2,
            "attention.layer_norm_rms_epsilon": c.norm_eps,
        },
    ),
    "olmo2": (lambda c: _pattern(c) if c.model_type == "olmo3" else {},),
    "exaone4": (_pattern,),
    "glm4moe": (_experts,),
    "ernie4_5-moe": (_experts, lambda c: {"interleave_moe_layer_step": c.moe_layer_interval}),
    "command-r": (lambda c: {"logit_scale": c.logit_scale},),
    "cohere2": (lambda c: {"logit_scale": c.logit_scale},),
    "starcoder2": (lambda _: {"attention.sliding_window": None},),
    "mamba": (_alone, _mamba),
    "mamba2": (_alone, _state),
    "jamba": (_experts, _mamba),
    "falcon-h1": (_state,),
    "hunyuan-dense": (_ntk,),
    "hunyuan-moe": (_ntk, _experts),
    "minimax-m2": (_experts, lambda _: {"expert_gating_func": 2}),
    "nemotron": (lambda c: {"attention.layer_norm_epsilon": c.norm_eps},),
    "nemotron_h": (_state,),
    "nemotron_h_moe": (_experts, _state, lambda _: {"feed_forward_length": None}),
}


def _tensors(stored: dict[str, torch.Tensor], config: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    known = {"deepseek32": "glm-dsa"}.get(name, name)  # which the package does not know yet
    names = gguf.get_tensor_name_map(
        next(arch for arch, each in gguf.MODEL_ARCH_NAMES.items() if each == known), config.num_hidden_layers
    )
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for key, tensor in stored.items():
        if key.startswith("pooler.") or "act_fn" in key:
            continue
        key = re.sub(r"^(distilbert|roberta)\.", "", key)
        key = key.removeprefix("model.") if name == "modern-bert" else key
        key = re.sub(r"^classifier\.(weight|bias)$", r"classifier.out_proj.\1", key)
        for part, values in _changed(key, tensor, config, name):
            parent, _, last = part.rpartition(".experts.")
            number, _, module = last.partition(".")
            if parent and number.isdigit():
                projection, _, kind = module.partition(".")
                stacked = f"blk.{parent.split('.')[2]}.ffn_{_PROJECTIONS[projection]}_exps.{kind}"
                stacks.setdefault(stacked, {})[int(number)] = values
            else:
                yield _target(names, part), values
    for target, each in stacks.items():
        yield target, torch.stack([each[number] for number in sorted(each)])
    if name == "gemma4":
        rope, size = config.rope_parameters["full_attention"], _gemma4(config)["attention.key_length"]
        rotated = int(size * rope["partial_rotary_factor"] / 2)
        yield "rope_freqs.weight", torch.tensor([1.0] * rotated + [1e30] * (size // 2 - rotated))
    if (rope := _first(config, "rope_parameters") or {}).get("rope_type") == "llama3":
        yield "rope_freqs.weight", torch.from_numpy(_llama3_factors(config, rope))
    if "long_factor" in (_first(config, "rope_parameters") or {}):
        for length in ("long", "short"):
            yield f"rope_factors_{length}.weight", torch.tensor(config.rope_parameters[f"{length}_factor"])


_RENAMED = {
    "e_score_correction_bias": "e_score_correction.bias",
    "expert_bias": "expert_bias.bias",
    ".sinks": ".sinks.weight",
    "layer_scalar": "layer_scalar.weight",
    "dt_bias": "dt_proj.bias",
}
"""Parts of names, where the converter adds an ending, or takes one off, before it looks them up."""


def _target(names: gguf.TensorNameMap, key: str) -> str:
    """Returns llama.cpp's name. Some are written where llama.cpp reads them under another one."""
    if "blk." in key:
        return key
    for stored, written in _RENAMED.items():
        key = key.replace(stored, written)
    found = names.get_name(key, try_suffixes=(".weight", ".bias"))
    assert found is not None, key
    return found


def _changed(key: str, x: torch.Tensor, config: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields what becomes of one tensor of a checkpoint."""
    block = f"blk.{key.split('.')[2]}" if ".layers." in key else ""
    if name in ONE_ADDED and key.endswith("norm.weight") and "linear_attn.norm" not in key:
        x = x + 1
    elif name in PAIRED and key.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
        x = _in_pairs(x, config.num_attention_heads if "q_proj" in key else config.num_key_value_heads)
    elif key.endswith("A_log"):
        x = -x.exp()
    elif name == "kimi-linear" and "conv1d.weight" in key:
        x = x[None]
    elif "conv1d.weight" in key or key.endswith("conv.conv.weight"):
        x = x.squeeze(1)
    if name in MAMBA2 and key.endswith(("A_log", ".D")):
        x = x[:, None]
    if name in MAMBA2 and key.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        x = x.view(_first(config, "mamba_n_groups", "n_groups"), -1)
    if name == "falcon-h1":
        x = _multiplied(key, x, config)
    if name.startswith("qwen35") and "linear_attn." in key:
        x = _tiled(key, x, config)
    if name == "kimi-linear":  # as which transformers saves a plain MLP
        key = re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", key)
    if key.endswith("kv_b_proj.weight") and not _first(config, "unsplit"):
        heads = x.view(config.num_attention_heads, -1, x.shape[1])
        keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        yield key.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
        yield key.replace("kv_b_proj", "v_b_proj"), values
    elif name == "llama4" and ".experts." in key:
        parts = x.transpose(1, 2).chunk(2, dim=1) if "gate_up" in key else (x.transpose(1, 2),)
        for part, values in zip(("gate", "up") if len(parts) == 2 else ("down",), parts, strict=True):
            yield f"{block}.ffn_{part}_exps.weight", values
    elif key.endswith("input_linear.weight"):
        gate, up = x.chunk(2, dim=-2)
        end = "exps" if x.dim() == 3 else "shexp" if config.num_local_experts else ""
        ending = f"_{end}" if end else ""
        yield f"{block}.ffn_gate{ending}.weight", gate
        yield f"{block}.ffn_up{ending}.weight", up
    elif key.endswith("output_linear.weight"):
        end = "_exps" if x.dim() == 3 else "_shexp" if config.num_local_experts else ""
        yield f"{block}.ffn_down{end}.weight", x
    elif name == "gpt-oss" and ".experts." in key:
        kind = "bias" if key.endswith("_bias") else "weight"
        x = x if kind == "bias" else x.transpose(1, 2)
        if "down_proj" in key:
            yield f"{block}.ffn_down_exps.{kind}", x
        else:
            yield f"{block}.ffn_gate_exps.{kind}", x[:, 0::2]
            yield f"{block}.ffn_up_exps.{kind}", x[:, 1::2]
    elif "query_key_value" in key:
        yield key, x.view(config.num_attention_heads, 3, -1, *x.shape[1:]).transpose(0, 1).flatten(0, 2)
    elif key.endswith("position_embeddings.weight"):
        yield key, x[_before_positions(config) :]
    elif name in ("gemma4", "mistral4") and ".experts." in key:
        yield f"{block}.ffn_{'gate_up' if 'gate_up' in key else 'down'}_exps.weight", x
    elif key.endswith("router.scale"):
        yield f"{block}.ffn_gate_inp.scale", x
    elif key.endswith("per_expert_scale"):
        yield f"{block}.ffn_down_exps.scale", x
    elif "in_proj_qkvz" in key:
        q = config.linear_key_head_dim
        v = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
        parts = x.view(config.linear_num_key_heads, -1, x.shape[1]).split([q, q, v, v], dim=1)
        yield f"{block}.attn_qkv.weight", torch.cat([part.flatten(0, 1) for part in parts[:3]])
        yield f"{block}.attn_gate.weight", parts[3].flatten(0, 1)
    else:
        yield key, x


def _multiplied(key: str, x: torch.Tensor, config: Any) -> torch.Tensor:
    """Multiplies a matrix of Falcon-H1 by the numbers that its config has for what goes in, and comes out."""
    gate, down = config.mlp_multipliers
    factors = {
        "down_proj": down,
        "gate_proj": gate,
        "q_proj": config.attention_in_multiplier,
        "k_proj": config.attention_in_multiplier * config.key_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    if key.endswith("in_proj.weight"):
        width, group = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        rows = torch.tensor([width, width, group, group, config.mamba_n_heads])
        return x * config.ssm_in_multiplier * torch.tensor(config.ssm_multipliers).repeat_interleave(rows)[:, None]
    return x * factors.get(key.split(".")[-2], 1.0)


def _tiled(key: str, x: torch.Tensor, config: Any) -> torch.Tensor:
    """Brings the first value heads of all key heads together, then the second ones: rows of values, or columns of the output."""
    heads, keys = config.linear_num_value_heads, config.linear_num_key_heads
    before = 2 * keys * config.linear_key_head_dim if "qkv" in key or "conv1d" in key else 0
    width = 1 if key.endswith(("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight")) else config.linear_value_head_dim
    order = torch.arange(heads * width).view(keys, heads // keys, width).transpose(0, 1).flatten()
    if "out_proj" in key:
        return x[:, order]
    if key.endswith("linear_attn.norm.weight"):
        return x
    return x[torch.cat([torch.arange(before), before + order])]
