"""BGE-M3's heads against the paper's formulas (arXiv 2402.03216), in torch over the encoder of transformers."""

from pathlib import Path

import pytest
import torch
from starling_engine import LLM
from starling_engine.args import EngineArgs
from starling_engine.errors import InvalidRequest
from starling_engine.frontend.pairs import ComparedTask
from starling_engine.frontend.pooling import check_pooling
from starling_engine.frontend.resolve import resolve
from starling_engine.outputs import SparseVector
from starling_engine.params import PoolingParams
from transformers import AutoTokenizer

from tests.engine.encoder_checkpoints import ENCODERS, VOCAB, write_encoder, write_tokenizer

TEXTS = ["what is a list?", "aa [SEP] aa"]
COMPARED: list[ComparedTask] = ["embed", "token_embed", "sparse_embed"]


def weights_of(found: object) -> torch.Tensor:
    """Returns the weight of each token of the vocabulary."""
    assert isinstance(found, SparseVector)
    dense = torch.zeros(VOCAB)
    dense[found.indices] = torch.tensor(found.values)
    return dense


def test_vectors_and_weights_of_tokens(tmp_path: Path) -> None:
    """The first token has no vector, and special tokens have no weight; that of a token that comes twice is the greater one.

    Scores are those of the authors' `compute_score`: by vectors of tokens it is the mean of the best cosines.
    """
    model = write_encoder(tmp_path, ENCODERS["xlm-roberta"])
    write_tokenizer(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    colbert, sparse = torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)
    torch.nn.init.constant_(sparse.bias, 0.5)
    torch.save(colbert.state_dict(), tmp_path / "colbert_linear.pt")
    torch.save(sparse.state_dict(), tmp_path / "sparse_linear.pt")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    settings = {"num_threads": 1, "show_progress": False, "max_num_seqs": 4}
    with LLM(str(tmp_path), load_format="pt", **settings) as llm:
        vectors = llm.encode(TEXTS, use_tqdm=False, pooling_task="token_embed")
        weights = llm.encode(TEXTS, use_tqdm=False, pooling_task="sparse_embed")
        whole = llm.embed(TEXTS, PoolingParams(pooling="cls"), use_tqdm=False)
        scores = {task: llm.score(TEXTS[0], TEXTS[1], False, pooling_task=task)[0].outputs.score for task in (*COMPARED, None)}
        with pytest.raises(InvalidRequest, match="possible: embed, token_embed, sparse_embed, got 'classify'"):
            llm.score(TEXTS[0], TEXTS[1], False, pooling_task="classify")  # type: ignore[arg-type]
    late, by_token = [torch.tensor(one.outputs.data) for one in vectors], [weights_of(one.outputs.data) for one in weights]
    assert scores["token_embed"] == pytest.approx((late[0] @ late[1].T).max(1).values.mean().item(), abs=1e-5)
    assert scores["sparse_embed"] == pytest.approx((by_token[0] @ by_token[1]).item(), abs=1e-5)
    assert scores["embed"] == scores[None] != scores["token_embed"]
    for text, tokens, lexical, one in zip(TEXTS, vectors, weights, whole, strict=True):
        ids = tokenizer(text)["input_ids"]
        with torch.inference_mode():
            hidden = model(torch.tensor([ids])).last_hidden_state[0]
            expected = torch.nn.functional.normalize(colbert(hidden[1:]), dim=1)
            each = sparse(hidden).relu()[:, 0].tolist()
        torch.testing.assert_close(torch.tensor(tokens.outputs.data), expected, atol=1e-4, rtol=0)
        state = torch.nn.functional.normalize(hidden[0], dim=0)
        torch.testing.assert_close(torch.tensor(one.outputs.embedding), state, atol=1e-4, rtol=0)
        found = lexical.outputs.data
        assert isinstance(found, SparseVector)
        wanted = torch.zeros(VOCAB)
        for token, weight in zip(ids, each, strict=True):
            if token not in tokenizer.all_special_ids:
                wanted[token] = max(wanted[token], weight)
        torch.testing.assert_close(weights_of(found), wanted, atol=1e-4, rtol=0)
        assert len(found.indices) > 1


def test_without_pickles_the_heads_are_refused_by_their_names(tmp_path: Path) -> None:
    write_encoder(tmp_path, ENCODERS["xlm-roberta"])
    for name in ("colbert_linear.pt", "sparse_linear.pt"):
        torch.save(torch.nn.Linear(64, 64).state_dict(), tmp_path / name)
    model = resolve(EngineArgs(model=str(tmp_path)))[1]
    check_pooling(PoolingParams(), model)
    for task in COMPARED[1:]:
        with pytest.raises(InvalidRequest, match=r"colbert_linear.pt and sparse_linear.pt .* --load-format pt") as refusal:
            check_pooling(PoolingParams(task=task), model)
        assert refusal.value.param == "model"
