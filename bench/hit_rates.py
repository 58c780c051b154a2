"""What share of prompts' tokens a multi-turn workload finds in the KV cache, by the kind of a model's layers, and who is preempted.

    python bench/hit_rates.py [--users 24] [--turns 6] [--only NAME ...]

The scheduler and the KV cache are real, their blocks those of published shapes; no model runs, for it changes no hit. Conversations
go on all at once, each with turns of its own, over three system prompts. One that has ended makes room for a new one. The cache has
room for a share of what all conversations and system prompts hold between turns, their keys and values in windows, and one state of
each, where there is one; and for what runs.

`whole`: a turn has all that was said before. `without thoughts`: the beginning of each earlier answer, its reasoning, is left out,
as the templates of reasoning models do.
"""

import argparse
import random
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shared import machine
from starling_engine.config import SchedulerConfig
from starling_engine.kv.layer_specs import kv_specs, state_specs
from starling_engine.kv.manager import KVManager
from starling_engine.kv.pool import OutOfBlocks
from starling_engine.kv.spec import KVGroup, StateGroup, group_layers, peak_blocks, slab_bytes
from starling_engine.model_config.config import parse_model_config
from starling_engine.model_config.fields import Fields
from starling_engine.params import SamplingParams
from starling_engine.request import EngineRequest
from starling_engine.request_state import RequestState
from starling_engine.scheduler.preemption_log import PreemptionLog
from starling_engine.scheduler.scheduler import Scheduler
from starling_engine.step import StepPlan, StepResult
from starling_engine.token_packing import pack_tokens

BLOCK = 16
BUDGET = 2048
LONGEST = 32768
RUNNING, LOAD = 6, 16
"""Requests that run at once, and those that do where preemptions are counted."""
SYSTEM = (400, 700, 1500)
"""Tokens of the system prompts."""
SHARES = (4.0, 1.0, 0.75, 0.5)
"""Room of the cache, beside what runs: 1 for what conversations and system prompts hold between turns."""
COMMON = {"vocab_size": 4096, "max_position_embeddings": LONGEST, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16"}
SHAPES: dict[str, dict[str, Any]] = {
    "full attention (Qwen3 0.6B)": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "windows of 128 (gpt-oss 20B)": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "use_sliding_window": True,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "windows of 1,024 (Gemma 3 4B)": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "use_sliding_window": True,
        "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5 + ["sliding_attention"] * 4,
    },
    "a state beside attention (Qwen3.5 0.8B)": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
    "a small state (LFM2 1.2B)": {
        "architectures": ["Lfm2ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 12288,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "conv_bias": False,
        "layer_types": ["full_attention" if layer in {2, 5, 8, 10, 12, 14} else "conv" for layer in range(16)],
    },
    "a state alone (Codestral Mamba 7B)": {
        "architectures": ["Mamba2ForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "num_heads": 128,
        "head_dim": 64,
        "n_groups": 8,
        "state_size": 128,
        "expand": 2,
        "conv_kernel": 4,
    },
}


class PromptPreemptions(PreemptionLog):
    """Counts preemptions of requests whose prompt is not computed yet, and those for want of blocks of such a prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.victims = self.growers = 0

    def add(self, victim: RequestState, grower: RequestState, missing: OutOfBlocks, *, swapped: bool) -> None:
        self.victims += victim.computed < victim.blocks.known_tokens - 1
        self.growers += grower.computed < grower.blocks.known_tokens - 1
        super().add(victim, grower, missing, swapped=swapped)


class Watched(Scheduler):
    """A scheduler whose preemptions are counted."""

    def __init__(self, kv: KVManager, running: int) -> None:
        super().__init__(SchedulerConfig(max_model_len=LONGEST, max_num_seqs=running, max_num_batched_tokens=BUDGET), kv)
        self._preemptions = self.prompts = PromptPreemptions()


@dataclass
class Conversation:
    """One user's text so far, and the turns that are left."""

    number: int
    text: list[int]
    left: int
    rests_until: int = 0
    rng: random.Random = field(default_factory=random.Random)

    def ask(self) -> list[int]:
        """Returns the next prompt: mostly short messages, some with a document."""
        length = self.rng.randint(600, 2500) if self.rng.random() < 0.12 else self.rng.randint(15, 250)
        self.text += self.rng.choices(range(100, 4000), k=length)
        return list(self.text)

    def answered(self, output: Sequence[int], thoughts: int) -> None:
        self.text += output[thoughts:]
        self.left -= 1


@dataclass(frozen=True)
class Cached:
    """What a model's layers cache, in blocks."""

    groups: list[KVGroup]
    state: StateGroup | None

    def blocks(self, length: int, in_flight: int = 0) -> int:
        """Returns those of a conversation: that is idle, with a snapshot, or runs."""
        return peak_blocks(self.groups, length, in_flight) + (self.state.num_blocks if self.state else 0)


def cached_by(shape: dict[str, Any]) -> Cached:
    model = parse_model_config(Fields({**COMMON, **shape}, "config.json"), Fields({}, "generation_config.json"))
    groups = group_layers(kv_specs(model, BLOCK, "bfloat16"))
    states = state_specs(model)
    if not states:
        return Cached(groups, None)
    spec, layers = next(iter(states.values())), tuple(states)
    columns = spec.columns(len(layers), slab_bytes(groups, spec, len(layers)))
    return Cached(groups, StateGroup(spec, layers, columns[-1], BLOCK))


def conversations(users: int, turns: int, seed: int) -> list[Conversation]:
    rng = random.Random(seed)
    systems = [rng.choices(range(100, 4000), k=length) for length in SYSTEM]
    return [
        Conversation(n, list(systems[n % len(systems)]), rng.randint(2, 2 * turns - 2), rng=random.Random(f"{seed} {n}"))
        for n in range(3 * users)
    ]


class Workload:
    """Runs conversations, `users` of them at once; each rests between its turns. `thinks`: answers begin with thoughts."""

    def __init__(self, scheduler: Watched, waiting: list[Conversation], users: int, *, thinks: bool) -> None:
        self.scheduler = scheduler
        self.thinks = thinks
        self.rng = random.Random(1)
        self.next = deque(waiting)
        self.resting = [self.next.popleft() for _ in range(users)]
        self.running: dict[str, Conversation] = {}
        self.outputs: dict[str, list[int]] = {}
        self.thoughts: dict[str, int] = {}
        self.lengths: list[int] = []
        self.steps = 0

    def run(self) -> None:
        while self.resting or self.running:
            self._ask()
            self.steps += 1
            plan = self.scheduler.schedule()
            if plan is not None:
                self._take(plan)

    def _ask(self) -> None:
        for one in [one for one in self.resting if one.rests_until <= self.steps]:
            self.resting.remove(one)
            name = f"{one.number}.{one.left}"
            self.thoughts[name] = one.rng.randint(50, 600) if self.thinks else 0
            wanted = SamplingParams(max_tokens=self.thoughts[name] + one.rng.randint(20, 300), ignore_eos=True)
            record = EngineRequest(id=name, prompt_ids=one.ask(), params=wanted)
            assert self.scheduler.answer_at_once(record) is None, "the workload fits"
            self.scheduler.add(record)
            self.running[name], self.outputs[name] = one, []

    def _take(self, plan: StepPlan) -> None:
        """Each row that samples gets a token by chance."""
        tokens = pack_tokens(self.rng.choices(range(100, 4000), k=sum(plan.sample)))
        for delta in self.scheduler.update(StepResult(plan.step_id, plan.epoch, [int(sample) for sample in plan.sample], tokens)):
            self.outputs[delta.id] += delta.tokens
            if delta.finish_reason is not None:
                self._end(delta.id)

    def _end(self, name: str) -> None:
        one = self.running.pop(name)
        one.answered(self.outputs.pop(name), self.thoughts.pop(name))
        one.rests_until = self.steps + one.rng.randint(50, 600)
        self.lengths.append(len(one.text))
        if one.left:
            self.resting.append(one)
        elif self.next:
            self.resting.append(self.next.popleft())


def measure(
    cached: Cached, share: float, length: int, users: int, turns: int, running: int = RUNNING, *, thinks: bool
) -> tuple[float, PromptPreemptions, int]:
    """Returns the share of prompts' tokens that were found, the preemptions of prompts, and the number of all."""
    held = users * cached.blocks(length) + sum(map(cached.blocks, SYSTEM))
    runs = 2 * (cached.blocks(length, BUDGET) - cached.blocks(length))
    if cached.state:  # its own, and a snapshot that takes an older one's place
        runs += 2 * RUNNING * cached.state.num_blocks
    kv = KVManager(cached.groups, int(share * held) + runs + 1, max_in_flight=BUDGET, state=cached.state)
    scheduler = Watched(kv, running)
    workload = Workload(scheduler, conversations(users, turns, 0), users, thinks=thinks)
    workload.run()
    scheduler.check_integrity()
    stats = scheduler.stats
    return stats.prefix_hits_total / stats.prefix_queries_total, scheduler.prompts, stats.preemptions_total


def typical_length(users: int, turns: int, *, thinks: bool) -> int:
    """Returns the mean length of a conversation between two turns."""
    workload = Workload(Watched(KVManager([], 1), users), conversations(users, turns, 0), users, thinks=thinks)
    workload.run()
    return round(statistics.mean(workload.lengths))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--users", type=int, default=24)
    parser.add_argument("--turns", type=int, default=6, help="mean number of a conversation's turns")
    parser.add_argument("--only", nargs="*", default=[], help="parts of shapes' names")
    args = parser.parse_args()
    shapes = {name: cached_by(shape) for name, shape in SHAPES.items() if any(part in name for part in args.only or [""])}
    print(f"{time.strftime('%Y-%m-%d')}. {machine()}.")
    for thinks in (False, True):
        length = typical_length(args.users, args.turns, thinks=thinks)
        print(f"\nTurns {'without thoughts' if thinks else 'whole'}: {args.users} conversations at once, of {length:,} tokens.\n")
        print(f"| layers | {' | '.join(f'room for {share:.0%}' for share in SHARES)} |\n|---|{'---:|' * len(SHARES)}")
        for name, cached in shapes.items():
            rates = [measure(cached, share, length, args.users, args.turns, thinks=thinks)[0] for share in SHARES]
            print(f"| {name} | {' | '.join(f'{rate:.1%}' for rate in rates)} |", flush=True)
    print(f"\nUnder load: {LOAD} run at once, in room for a quarter of {args.users} conversations; turns without thoughts.\n")
    print("| layers | preempted | of them in mid-prefill | for want of a prompt's blocks |\n|---|---:|---:|---:|")
    for name, cached in shapes.items():
        _, prompts, preempted = measure(cached, 0.25, length, args.users, args.turns, LOAD, thinks=True)
        print(f"| {name} | {preempted} | {prompts.victims} | {prompts.growers} |", flush=True)


if __name__ == "__main__":
    main()
