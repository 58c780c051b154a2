"""Kernels that are compiled ahead are all that a rank needs later, and the rank finds them."""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from starling_engine.config import ParallelLayout, SpeculativeConfig, WorkerConfig
from starling_engine.ipc.priority import NICENESS, lower_priority
from starling_engine.kernels.ahead import LateKernels, compile_variants
from starling_engine.parallel.communicator import no_tick
from starling_engine.platforms.triton_support import H200
from starling_engine.worker import warm
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bench.gpu.shapes import model_folder
from tests.engine.checkpoints import BASE, FAMILIES, VARIANTS
from tests.engine.kernels.compiled import compile_here, forget_compiled, in_compiler
from tests.engine.workers import plain_worker

pytestmark = pytest.mark.timeout(200)

OTHERS = {
    "DeepseekV3": replace(VARIANTS["deepseek-v3"], changes={**VARIANTS["deepseek-v3"].changes, "num_hidden_layers": 2}),
    "Gemma3": FAMILIES["gemma3"],
    "GptOss": VARIANTS["gpt-oss"],
    "Qwen3Next": FAMILIES["qwen3-next"],
}
"""Small models with latent attention, with windows (and so two groups of layers), with sinks, and with recurrent state."""

LENGTHS = [[40], [1, 1, 300], [300, 1, 1, 1], [33] * 7, [30] * 60, [5, 200, 7, 1, 90], [8] * 64, [1] * 20 + [700] * 2 + [9] * 3]


def config_of(folder: Path, shape: str, **changes: object) -> WorkerConfig:
    """Of a small model, in limits in which contexts are split and prefixes are attended to apart."""
    settings = {"load_format": "dummy", "device": "cuda", "dtype": "bfloat16", "max_num_batched_tokens": 2048}
    sizes = {"max_model_len": 8192, "max_num_seqs": 64}
    if shape in OTHERS:
        model = BASE | {"max_position_embeddings": 8192} | OTHERS[shape].changes
        CONFIG_MAPPING[OTHERS[shape].model_type](**model, architectures=[f"{shape}ForCausalLM"]).save_pretrained(folder)
    else:
        folder = model_folder(shape, toy=True, root=folder)
    return plain_worker(model_path=str(folder), **settings, **sizes | changes)


def met_later(config: WorkerConfig) -> tuple[int, list[str]]:
    """Returns how many kernels are met when a rank gets ready, and those that steps of any size meet then. Runs in the compiler."""
    from starling_engine.kernels.ahead import note_launches, pretend
    from starling_engine.worker.device.step_buffer import StepShape

    pretend(H200)
    forget_compiled()
    runner = warm.shapes_only_runner(config)
    known = {(kernel.__name__, data) for kernel, data in note_launches(lambda: warm.meet_kernels(runner))}

    def step(tokens: int, rows: int, longest: int, shared: int = 0) -> Callable[[], None]:
        """Rows of at most `longest` tokens; with `shared`, blocks that they have in common."""

        def run() -> None:
            fields = runner._writer.padding(StepShape(tokens, rows, rows))
            hidden = runner._forward(fields, None, longest, shared=shared)
            runner._head(fields, hidden[:rows].contiguous(), 0)

        return run

    def prompts(lengths: list[int], before: int = 0) -> Callable[[], None]:
        """Rows of such lengths, which the host knows, behind so many tokens in the cache."""

        def run() -> None:
            starts = [0, *itertools.accumulate(lengths)]
            fields = runner._writer.padding(StepShape(starts[-1], len(lengths), 1))
            runner._forward(fields, None, max(lengths), host_lens=(starts, [before + length for length in lengths]))

        return run

    steps = [step(rows, rows, 1) for rows in (1, 2, 3, 7, 16, 33, 63, 64)]
    steps += [step(tokens, rows, tokens) for tokens, rows in ((1, 1), (5, 1), (16, 2), (513, 1), (777, 33), (1024, 64), (2048, 3))]
    steps += [step(1000, rows, 900) for rows in (2, 5, 9, 17, 40)]
    steps += [step(rows * longest, rows, longest) for rows in (1, 3, 64) for longest in (2, 3, 8, 30)]
    shares = (3, 100, 508)
    for rows, longest, shared in itertools.product((8, 64), (1, 3, 8, 12, 33), (*shares, 16)):
        steps.append(step(min(2048, rows * longest), rows, longest, shared))
    steps += [step(tokens, rows, 900, shared) for tokens in (963, 2048) for rows in (8, 64) for shared in shares]
    steps += [prompts(lengths, before) for lengths in LENGTHS for before in (0, 5000)]
    with torch.inference_mode():
        later = [each for run in steps for each in note_launches(run)]
    return len(known), sorted({kernel.__name__ for kernel, data in later if (kernel.__name__, data) not in known})


def count_variants(config: WorkerConfig) -> int:
    from starling_engine.kernels.ahead import pretend

    pretend(H200)
    forget_compiled()
    return len(warm.variants_of(config))


def _named(shape: str, *, eager: bool, whole: bool) -> object:
    return pytest.param(shape, eager, id=f"{shape}-{'eager' if eager else 'recorded'}", marks=[pytest.mark.whole] * whole)


@pytest.mark.parametrize(
    ("shape", "eager"),
    [
        *(_named(shape, eager=eager, whole=False) for shape in ("Llama-3-8B", "DeepseekV3") for eager in (False, True)),
        _named("Qwen3Next", eager=False, whole=False),
        _named("Qwen3Next", eager=True, whole=True),
        *(_named(shape, eager=eager, whole=True) for shape in ("30B-A3B", "Gemma3", "GptOss") for eager in (False, True)),
    ],
)
def test_no_later_step_needs_another_kernel(shape: str, eager: bool, tmp_path: Path) -> None:
    known, later = in_compiler(met_later, config_of(tmp_path, shape, enforce_eager=eager))
    assert known > 15 and later == []


@pytest.mark.whole
def test_no_later_step_of_weights_in_fp8_needs_another_kernel(tmp_path: Path) -> None:
    known, later = in_compiler(met_later, config_of(tmp_path, "Llama-3-8B", quantization="fp8"))
    assert known > 15 and later == []


@pytest.mark.whole
@pytest.mark.parametrize("local", [1, 2], ids=["apart", "on one machine"])
def test_a_rank_of_several_is_looked_at_without_the_others(local: int, tmp_path: Path) -> None:
    layout = ParallelLayout(tensor=2)
    known, later = in_compiler(met_later, config_of(tmp_path, "Llama-3-8B", layout=layout, local_ranks=local))
    assert known > 15 and later == []


def test_a_later_stage_gets_ready_without_the_one_before(tmp_path: Path) -> None:
    variants = in_compiler(count_variants, config_of(tmp_path, "Llama-3-8B", layout=ParallelLayout(pipeline=2), rank=1))
    assert variants > 15


def test_drafts_of_the_devices_own_are_met(tmp_path: Path) -> None:
    own = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    plain, drafting = (
        in_compiler(
            count_variants, config_of(tmp_path, "Llama-3-8B", num_speculative_tokens=3, own_drafts=drafts, enforce_eager=True)
        )
        for drafts in (None, own)
    )
    assert drafting == plain + 1


@pytest.mark.whole  # a process that imports torch
def test_a_failure_is_told_and_nothing_else_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    config = config_of(tmp_path, "Llama-3-8B", attention_backend="sdpa")
    compilation, ticks = warm.KernelCompilation(config, H200), []
    compilation.wait(lambda: ticks.append(1))
    assert "compiled as they come" in caplog.text and "attention_backend" in caplog.text and ticks
    assert not (tmp_path / "cache").exists()


def launch_merge() -> None:
    from starling_engine.kernels.split_attention import Partial, merge

    merge(Partial(torch.empty(3, 1, 2, 16, device="meta"), torch.empty(3, 1, 2, device="meta")), torch.float32)


def count_late() -> list[int]:
    """Counts the late kernels of two launches alike. Nothing else in this process has such heads."""
    from triton import knobs

    late = LateKernels()
    try:
        counts = []
        for _ in range(2):
            compile_here(launch_merge)
            counts.append(late.take())
        return counts
    finally:
        knobs.runtime.jit_post_compile_hook = None


def test_a_kernel_that_is_met_late_is_counted_once() -> None:
    assert in_compiler(count_late) == [1, 0]


@pytest.mark.parametrize(
    ("program", "said"),
    [("kill -9 $$", "the process ended with status -9"), ("exec sleep 600", "took more than"), (None, "No such file")],
    ids=["killed", "late", "not started"],
)
def test_a_rank_starts_whatever_becomes_of_the_compiling_process(
    program: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    python = tmp_path / "python"
    if program is not None:
        python.write_text(f"#!/bin/sh\n{program}\n")
        python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(warm, "MOST_SECONDS", 0.5 if program and "sleep" in program else 60.0)
    compilation = warm.KernelCompilation(config_of(tmp_path, "Llama-3-8B"), H200)
    compilation.wait(no_tick)
    assert "compiled as they come" in caplog.text and said in caplog.text
    assert compilation._process is None or compilation._process.wait(60) == -signal.SIGKILL
    assert not (tmp_path / "cache").exists()


def unreadable_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent without permission to search it; root, as whom tests may run, has it anyway."""

    def unreadable(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", unreadable)


def no_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)


@pytest.mark.parametrize(
    ("damage", "said"), [(unreadable_cache, "Permission denied"), (no_temporary_files, "No space left on device")]
)
def test_a_rank_starts_without_a_folder_for_kernels_or_temporary_files(
    damage: Callable[[pytest.MonkeyPatch], None],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = config_of(tmp_path, "Llama-3-8B")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    with monkeypatch.context() as patched:
        damage(patched)
        # What reads the model is not damaged, and comes first in a rank.
        patched.setattr(warm, "load_model_config", str)
        compilation = warm.KernelCompilation(config, H200)
    compilation.wait(no_tick)
    assert "compiled as they come" in caplog.text and said in caplog.text


def test_kernels_are_compiled_at_a_lower_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    asked: list[int] = []
    monkeypatch.setattr(warm, "lower_priority", asked.append)
    compilation = warm.KernelCompilation(config_of(tmp_path, "Llama-3-8B"), H200)
    compilation.wait(no_tick)
    assert compilation._process is not None and asked == [compilation._process.pid]


def test_another_process_is_made_nicer() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        before = os.getpriority(os.PRIO_PROCESS, process.pid)
        lower_priority(process.pid)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(19, before + NICENESS)
        assert os.getpriority(os.PRIO_PROCESS, 0) == before, "this process is as it was"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("cpus", "memory", "ranks", "processes"),
    [
        (4, 64 << 30, 1, 4),
        (192, 1 << 40, 1, 16),
        (192, 1 << 40, 8, 2),
        (64, 12 << 30, 1, 6),
        (64, 1 << 30, 1, 1),
        (8, 64 << 30, 16, 1),
    ],
)
def test_compilers_are_bounded_by_cpus_memory_and_the_ranks_of_a_node(cpus: int, memory: int, ranks: int, processes: int) -> None:
    assert warm.compilers(cpus, memory, ranks) == processes


class Killed:
    """A kernel that needs more memory than there is."""

    def preload(self, _data: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def compile_killed() -> str:
    try:
        compile_variants([(Killed(), "")] * 2, processes=2)
    except BrokenProcessPool as error:
        return str(error)
    return ""


def test_a_compiler_that_is_killed_is_not_waited_for() -> None:
    assert "terminated abruptly" in in_compiler(compile_killed)


@pytest.mark.whole  # half a minute of compiling
def test_what_was_compiled_ahead_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    config = config_of(tmp_path, "Llama-3-8B")
    warm.KernelCompilation(config, H200).wait(no_tick)
    assert len(list((tmp_path / "cache").rglob("attention_kernel.cubin"))) >= 4
    began = set((tmp_path / "cache").iterdir())
    warm.KernelCompilation(config, H200).wait(no_tick)
    assert set((tmp_path / "cache").iterdir()) == began, "there was nothing left to do"
