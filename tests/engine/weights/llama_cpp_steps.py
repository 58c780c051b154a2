"""`python llama_cpp_steps.py FILE < PROMPTS`: what llama.cpp takes for the next token of each prompt, as JSON.

Prompts are lists of token ids. An answer is a list of [id, log p] of the five likeliest, in float32 as far as llama.cpp has it;
it is empty where the likeliest is half a character, which the server shows to nobody. A process of its own, since llama.cpp fills
it with threads, and may end it.
"""

import json
import sys

import xllamacpp
from xllamacpp import ggml_type, llama_flash_attn_type


def main(file: str, prompts: list[list[int]]) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx, params.n_parallel = 512, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = ggml_type.GGML_TYPE_F32
    params.flash_attn_type = llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.verbosity = -1
    server = xllamacpp.Server(params)
    answers = []
    for prompt in prompts:
        wanted = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "n_probs": 5, "cache_prompt": False}
        found = server.handle_completions(wanted)["choices"][0]["logprobs"]
        answers.append([[top["id"], top["logprob"]] for step in (found or {}).get("content", []) for top in step["top_logprobs"]])
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1], json.load(sys.stdin))
