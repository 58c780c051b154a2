"""`python llama_cpp_answers.py FILE PROMPT...`: what llama.cpp answers greedily to each prompt, as JSON.

An answer is a list of [id, [[id, log p] of the two likeliest]]. A process of its own, since llama.cpp fills it with threads.
"""

import json
import sys

import xllamacpp

TOKENS = 32


def main(file: str, prompts: list[str]) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx, params.n_parallel = 2048, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
    params.verbosity = -1
    server = xllamacpp.Server(params)
    answers = []
    for prompt in prompts:
        wanted = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "n_probs": 2, "cache_prompt": False}
        choice = server.handle_completions(wanted)["choices"][0]
        steps = choice["logprobs"]["content"]
        answers.append([[step["id"], [[top["id"], top["logprob"]] for top in step["top_logprobs"]]] for step in steps])
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
