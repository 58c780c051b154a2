"""Codes of each format in each layout: ranks with parts, stages, and experts that move, against one rank with all of them."""

from functools import partial
from pathlib import Path

import pytest
import torch
from starling_engine import native
from starling_engine.attention.mla_torch import TorchMla
from starling_engine.attention.torch_paged import TorchPagedAttention
from starling_engine.expert_parallel.peers import ExpertPeer, ExpertServer, FindPeers
from starling_engine.expert_parallel.ranks import ExpertRanks
from starling_engine.expert_parallel.rearrangement import Rearrangement
from starling_engine.layers.experts_select import select_experts_method
from starling_engine.layers.linear_select import select_linear_method
from starling_engine.model_config.config import load_model_config
from starling_engine.models.decoder import Decoder
from starling_engine.parallel.communicator import ALONE, Communicator
from starling_engine.topology.epoch import CHECKPOINT, PEERS
from starling_engine.topology.placement import Placement
from starling_engine.topology.shard import Shard
from starling_engine.weights.checkpoint import stored_formats
from starling_engine.weights.loader import Checkpoint, load_weights

from tests.engine.checkpoints import Variant, write_checkpoint
from tests.engine.expert_parallel.test_peers import Away
from tests.engine.expert_parallel.test_ranks import first_placement, wait
from tests.engine.gguf_files import write_gguf
from tests.engine.paged_driver import PagedDriver
from tests.engine.parallel.threads import Join, on_ranks, on_threads
from tests.engine.quantized_checkpoints import auto_round, bitsandbytes, compressed, fp8_blocks, model_opt
from tests.engine.quantized_experts import DENSE, LATENT, SPARSE, write_dense, write_experts, write_in_order
from tests.engine.weights.test_mxfp4_experts import write_pair
from tests.engine.written import Written

pytestmark = [
    pytest.mark.skipif(native.load() is None, reason="this machine has no native kernels"),
    pytest.mark.timeout(120),
]

CPU, BF16 = torch.device("cpu"), torch.bfloat16
PROMPT = [(7 * at * at + 3 * at) % 512 for at in range(48)]
TOOLS = {
    "gptq": partial(auto_round, "auto_gptq", 4, symmetric=True),
    "gptq in 8 bits": partial(auto_round, "auto_gptq", 8, symmetric=True, group=128),
    "awq": partial(auto_round, "auto_awq", 4, symmetric=False, group=64),
    "W4A16": partial(compressed, "W4A16"),
    "W4A16_ASYM": partial(compressed, "W4A16_ASYM"),
    "W8A8": partial(compressed, "W8A8"),
    "FP8_DYNAMIC": partial(compressed, "FP8_DYNAMIC"),
    "fp8 in blocks": lambda: fp8_blocks,
    "NVFP4": partial(compressed, "NVFP4"),
    "modelopt": lambda: model_opt,
    "MXFP4A16": partial(compressed, "MXFP4A16"),
    "nf4": partial(bitsandbytes, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "LLM.int8": partial(bitsandbytes, load_in_8bit=True),
}
"""Formats that a tool writes."""
FILES = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "MXFP4")
"""Types of GGUF files."""
SAMPLE = ("W4A16", "Q4_K")
"""Formats without the others' tools, which take seconds to import; the others run in make test-all."""


GATHERED = "gptq in another order"


def kinds(*names: str) -> list[object]:
    return [kind if kind in SAMPLE else pytest.param(kind, marks=pytest.mark.whole) for kind in names]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models without experts: folders, and GGUF files."""
    folder = tmp_path_factory.mktemp("dense")

    def write(kind: str) -> Path:
        if kind in FILES:
            return in_file(folder / kind, kind, DENSE)
        if kind == GATHERED:
            write_in_order(found["gptq"], folder / kind)
            return folder / kind
        write_dense(TOOLS[kind], folder / kind)
        return folder / kind / "dense"

    found = Written(write)
    return found


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with latent attention."""
    folder = tmp_path_factory.mktemp("latent")

    def write(kind: str) -> Path:
        write_dense(TOOLS[kind], folder / kind, LATENT)
        return folder / kind / "dense"

    return Written(write)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory, dense: dict[str, Path]) -> dict[str, Path]:
    """Models of experts."""
    folder = tmp_path_factory.mktemp("sparse")

    def write(kind: str) -> Path:
        if kind in FILES:
            return in_file(folder / kind, kind, SPARSE)
        (folder / kind).mkdir()
        if kind == "mxfp4":
            write_pair(folder, folder / kind)
        else:
            write_experts(dense[kind], folder / kind)
        return folder / kind

    return Written(write)


def in_file(folder: Path, type_name: str, variant: Variant) -> Path:
    folder.mkdir()
    write_checkpoint(folder, variant)
    write_gguf(folder / "model.gguf", folder, lambda _: type_name)
    return folder / "model.gguf"


def model_of(
    path: Path, *, tensor: Communicator = ALONE, stage: Shard | None = None, experts: ExpertRanks | None = None
) -> Decoder:
    """Builds the model, and fills it with the path's codes."""
    config, stored = load_model_config(path), stored_formats(path)
    model = Decoder(
        config,
        BF16,
        CPU,
        select_linear_method(BF16, CPU, None, stored),
        TorchMla() if config.mla else TorchPagedAttention(),
        experts_method_selector=select_experts_method(BF16, CPU, None, stored),
        tensor=tensor,
        stage=stage or Shard(0, 1),
        expert_ranks=experts,
    )
    load_weights(model, path)
    return model


def alone(path: Path) -> torch.Tensor:
    """Returns the logits of one rank, which multiplies the codes."""
    model = model_of(path)
    assert {experts.method.name for experts in model.experts.values()} <= {"quantized"}
    return PagedDriver(model, BF16, block_size=8).run([(0, PROMPT)])[0].float()


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Sums are rounded in parts, so not to the bit; a near tie may send a token to other experts."""
    differ = (found.float() - expected).norm(dim=1) / expected.norm(dim=1)
    assert differ.median() < 0.03 and (differ > 0.1).float().mean() < 0.15
    assert (found.argmax(1) == expected.argmax(1)).float().mean() > 0.85


def parts(path: Path, split: str) -> list[torch.Tensor]:
    if split == "two stages":
        first, later = (model_of(path, stage=Shard(at, 2)) for at in range(2))
        return [PagedDriver(first, BF16, block_size=8, later=[later]).run([(0, PROMPT)])[0]]

    def work(ranks: Communicator) -> torch.Tensor:
        return PagedDriver(model_of(path, tensor=ranks), BF16, block_size=8, tensor=ranks.shard).run([(0, PROMPT)])[0]

    return on_ranks(2, "gloo", work)


def check_parts(path: Path, split: str) -> None:
    """Asserts that ranks with parts of a model answer as one does that has it whole."""
    expected = alone(path)
    for found in parts(path, split):
        check(found, expected)


@pytest.mark.parametrize("split", ["two ranks", "two stages"])
@pytest.mark.parametrize("kind", kinds(*TOOLS, *FILES, GATHERED))
def test_ranks_have_parts_of_matrices(kind: str, split: str, dense: dict[str, Path]) -> None:
    check_parts(dense[kind], split)


@pytest.mark.parametrize("split", ["two ranks", "two stages"])
@pytest.mark.parametrize("kind", kinds(*TOOLS))
def test_ranks_have_parts_of_latent_attention(kind: str, split: str, latent: dict[str, Path]) -> None:
    check_parts(latent[kind], split)


@pytest.mark.parametrize("split", ["two ranks", "two stages"])
@pytest.mark.parametrize("kind", kinds(*TOOLS, *FILES, GATHERED, "mxfp4"))
def test_ranks_have_parts_of_experts(kind: str, split: str, sparse: dict[str, Path]) -> None:
    check_parts(sparse[kind], split)


@pytest.mark.parametrize("source", ["files", "peers"])
@pytest.mark.parametrize("kind", kinds(*TOOLS, *FILES, GATHERED, "mxfp4"))
def test_experts_move_while_ranks_serve(kind: str, source: str, sparse: dict[str, Path]) -> None:
    """Two ranks have tokens of their own, and half of the experts each; these change places in the middle."""
    path = sparse[kind]
    expected = alone(path)
    before = first_placement(path, 2)
    after = Placement(before.num_experts, tuple((second, first) for first, second in before.layers))
    servers: dict[int, ExpertServer] = {}

    def peers_of(index: int) -> FindPeers:
        return lambda _: [ExpertPeer(servers[1 - index].address, servers[1 - index].holds())]

    def work(index: int, join: Join) -> torch.Tensor:
        ranks = ExpertRanks(before.num_experts, before.num_experts)
        communicator = join("experts", index, 2)
        ranks.set_placement(communicator, before)
        model = model_of(path, experts=ranks)
        driver = PagedDriver(model, BF16, block_size=8)
        servers[index] = ExpertServer(model.experts, "127.0.0.1")
        logits = driver.run([(0, PROMPT[:20])])
        moves = Rearrangement(ranks, model.experts, Checkpoint(path) if source == "files" else Away())
        moves.start(after, index, find_peers=peers_of(index) if source == "peers" else None)
        wait(moves)
        assert moves.loaded[PEERS if source == "peers" else CHECKPOINT].experts == sum(map(len, after.held(index)))
        logits += driver.run([(0, PROMPT[20:25])])
        moves.commit(join("others", index, 2))
        logits += driver.run([(0, PROMPT[25:])])
        return torch.cat(logits)

    try:
        for found in on_threads(2, "gloo", work):
            check(found, expected)
    finally:
        for server in servers.values():
            server.close()
