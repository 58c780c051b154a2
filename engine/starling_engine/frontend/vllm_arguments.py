"""Arguments of vLLM's engine that people bring along and that are not here: what to do instead. None is accepted and ignored."""

from collections.abc import Callable

from starling_engine.args import ARGUMENTS

NOT_NEEDED = "leave it out: "
CODE = NOT_NEEDED + "no checkpoint's code is run; docs/models.md says how a model is added"
TASK = NOT_NEEDED + "the checkpoint says what the model is for"
LORA = "merge the adapter into the model: LoRA is not supported yet"
MEDIA = NOT_NEEDED + "images, audio and other media are not supported yet"
DEFAULTS = "send them with requests; what the checkpoint's generation_config.json says are the defaults"
POOLING = "send pooling and normalize with requests; what the checkpoint's files say are the defaults"
FORMS = NOT_NEEDED + "llguidance enforces every form"
VLLM_ARGUMENTS = {
    "trust_remote_code": CODE,
    "code_revision": CODE,
    "hf_token": "set $HF_TOKEN",
    "download_dir": "set $HF_HOME",
    "hf_overrides": "write the change into the config.json of a copy of the checkpoint",
    "skip_tokenizer_init": NOT_NEEDED + "prompts may be token ids, and requests with detokenize false get no text",
    "tokenizer_mode": NOT_NEEDED + "tokenizer.json, or what a GGUF file has in its place, says all",
    "tokenizer_revision": "name it in {tokenizer}: org/name@revision",
    "enable_chunked_prefill": NOT_NEEDED + "prompts are always computed in chunks",
    "num_gpu_blocks_override": "give {kv_cache_memory_bytes}",
    "kv_offloading_size": "give {kv_cpu_bytes}",
    "swap_space": "give {kv_cpu_bytes}",
    "cpu_offload_gb": "give {quantization} int4, or a GGUF file: weights stay on their device",
    "task": TASK,
    "runner": TASK,
    "convert": TASK,
    "pooler_config": POOLING,
    "override_pooler_config": POOLING,
    "generation_config": DEFAULTS,
    "override_generation_config": DEFAULTS,
    "guided_decoding_backend": FORMS,
    "structured_outputs_config": FORMS,
    "max_logprobs": NOT_NEEDED + "20 are possible",
    "disable_log_stats": NOT_NEEDED + "statistics are at a server's /metrics",
    "enable_lora": LORA,
    "lora_modules": LORA,
    "limit_mm_per_prompt": MEDIA,
    "mm_processor_kwargs": MEDIA,
    "distributed_executor_backend": NOT_NEEDED + "ranks are processes",
    "compilation_config": "see {enforce_eager}",
    "max_seq_len_to_capture": "see {enforce_eager}",
}
"""Names of vLLM's, and what to do instead. Those in braces are arguments of ours."""


def instead_of(name: str, spell: Callable[[str], str] = str) -> str | None:
    """Returns what takes the place of vLLM's argument, with our arguments as `spell` writes them; None for an unknown one."""
    text = VLLM_ARGUMENTS.get(name)
    return None if text is None else text.format_map({ours: spell(ours) for ours in ARGUMENTS})
