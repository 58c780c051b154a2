"""Numbers of prompts as /pooling answers them. Those of each token may be many, so their answer has a limit."""

import asyncio
import base64
from collections.abc import Sequence

import msgspec
from starling_engine.errors import InvalidRequest
from starling_engine.frontend.pooling import activated_rows
from starling_engine.model_config.classifier import LabelActivation, activated
from starling_engine.model_config.config import ModelConfig
from starling_engine.outputs import PooledNumbers, SparseVector, TokenRows
from starling_engine.params import OF_TOKENS, PoolingParams

from starling_agent.openai.protocol.answers import PooledData, SparseData
from starling_agent.openai.vector_types import as_base64

MAX_ANSWER_BYTES = 256 << 20
FLOAT_CHARACTERS = 21
"""Characters of a number in JSON, with what is between two."""
BASE64_CHARACTERS = 16 / 3


def check_answer_size(prompts: Sequence[list[int]], field: str, params: PoolingParams, model: ModelConfig, as_text: bool) -> None:
    """Raises InvalidRequest for prompts whose tokens would have more numbers than an answer has room for."""
    if params.task not in OF_TOKENS:
        return
    tokens = sum(map(len, prompts))
    width = params.dimensions or model.vector_size if params.task == "token_embed" else _num_labels(model)
    size = int(tokens * width * (BASE64_CHARACTERS if as_text else FLOAT_CHARACTERS))
    if size > MAX_ANSWER_BYTES:
        hint = "send fewer" if as_text else "send fewer, or ask for base64 by encoding_format"
        numbers = f"{tokens} tokens with {width} numbers each"
        why = f"{numbers} would take {size >> 20} MiB, and at most {MAX_ANSWER_BYTES >> 20} are possible"
        raise InvalidRequest(f"{why}; {hint}", field)


def _num_labels(model: ModelConfig) -> int:
    return 0 if model.classifier is None else len(model.classifier.labels)


async def pooled_data(index: int, numbers: PooledNumbers, activation: LabelActivation, as_text: bool) -> PooledData:
    """Returns the entry of one input. Rows are written in a thread, one after the other: others run between them."""
    if isinstance(numbers, SparseVector):
        return PooledData(index=index, data=SparseData(numbers.indices, numbers.values))
    if isinstance(numbers, list):
        vector = activated(activation, numbers)
        return PooledData(index=index, data=as_base64(vector) if as_text else vector)
    rows = activated_rows(activation, numbers)
    return await asyncio.to_thread(_of_rows, index, rows, as_text)


def _of_rows(index: int, rows: TokenRows, as_text: bool) -> PooledData:
    if as_text:
        text = base64.b64encode(rows.astype("<f4", copy=False).tobytes()).decode("ascii")
        return PooledData(index=index, data=text, shape=(len(rows), rows.shape[1]))
    written = b",".join(msgspec.json.encode(row.tolist()) for row in rows)
    return PooledData(index=index, data=msgspec.Raw(b"[" + written + b"]"))
