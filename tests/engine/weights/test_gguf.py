"""GGUF files: the same model as the checkpoint that they were made from, and every damage named before memory is taken."""

import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from starling_engine.errors import ModelError, UnsupportedModel, WeightError
from starling_engine.gguf.config import read_pooling
from starling_engine.gguf.metadata import GgufMetadata
from starling_engine.gguf.reader import BLOCK_TYPES, OTHER_TYPES, GgufFile, open_gguf
from starling_engine.gguf.rope import LONG_FACTORS, SHORT_FACTORS, read_scaling
from starling_engine.gguf.tokenizer import read_gguf_tokenizer
from starling_engine.kv_offload.secondary.fingerprint import fingerprint_of
from starling_engine.model_config.config import ModelConfig, load_model_config
from starling_engine.model_config.rope import LinearScaling, YarnScaling
from starling_engine.native.gguf_blocks import FORMATS, dequantize_blocks, read_blocks
from starling_engine.native.group_quantized import Format
from starling_engine.weights.checkpoint import open_checkpoint

from tests.engine.checkpoints import VARIANTS, Variant, write_checkpoint
from tests.engine.gguf_converter import convert
from tests.engine.gguf_files import BY_32, BY_256, entry, header, quantize, tensor, text, typed_entry, write_gguf
from tests.engine.weights.test_loader import loaded

LLAMA3 = {**VARIANTS["llama3.1"].changes["rope_parameters"], "original_max_position_embeddings": 8192}
SAME = {
    name: VARIANTS[name]
    for name in ("llama2", "llama-linear", "llama-biases", "llama-tied-wide-heads", "mistral-full", "mixtral", "qwen2", "qwen3")
} | {
    "llama3.1": Variant("llama", {"rope_parameters": LLAMA3, "head_dim": 64}),
    "qwen3-tied": VARIANTS["qwen3-tied"],
    "qwen3-moe": VARIANTS["qwen3-moe"],
}


def file_of(name: str, folder: Path) -> bytes:
    """Writes a checkpoint into `folder`, and model.gguf of it; returns that file's bytes."""
    write_checkpoint(folder, VARIANTS[name])
    write_gguf(folder / "model.gguf", folder)
    return (folder / "model.gguf").read_bytes()


@pytest.mark.parametrize("type_name", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("name", SAME)
@pytest.mark.matrix
def test_the_model_is_that_of_its_checkpoint(name: str, type_name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SAME[name])
    write_gguf(tmp_path / "model.gguf", tmp_path, lambda _: type_name)
    actual, expected = loaded(tmp_path / "model.gguf"), loaded(tmp_path)
    bound = {"F32": 1e-5, "F16": 5e-3, "BF16": 5e-2}[type_name] * expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=bound)


def test_the_config_is_that_of_its_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SAME["llama3.1"])
    write_gguf(tmp_path / "model.gguf", tmp_path)
    actual, expected = load_model_config(tmp_path / "model.gguf"), load_model_config(tmp_path)
    assert actual.ropes == expected.ropes
    assert (actual.max_position, actual.vocab_size, actual.dtype) == (expected.max_position, expected.vocab_size, "float32")


@pytest.mark.parametrize("type_name", (*BY_32, *BY_256))
def test_blocks_are_what_gguf_reads(type_name: str) -> None:
    matrix = np.random.default_rng(0).standard_normal((9, 512), dtype=np.float32)
    raw = quantize(matrix, type_name)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name]))
    block = next(each for each in BLOCK_TYPES.values() if each.name == type_name)
    assert torch.equal(dequantize_blocks(torch.from_numpy(raw), block, torch.float32), expected)
    codes = read_blocks(torch.from_numpy(raw), block)
    assert codes.format == FORMATS[type_name] and int(codes.codes.max()) < 2**codes.format.bits
    exact = type_name in BY_32
    torch.testing.assert_close(codes.dequantized(), expected, rtol=0, atol=0 if exact else 1e-3 * expected.abs().max().item())


@pytest.mark.parametrize("type_name", BY_32)
@pytest.mark.parametrize("name", ["llama2", "qwen3-moe"])
@pytest.mark.matrix
def test_a_quantized_model_is_that_of_its_numbers(name: str, type_name: str, tmp_path: Path) -> None:
    """Numbers and codes agree in whole and in part, those of experts and of queries in pairs included."""
    write_checkpoint(tmp_path, Variant(VARIANTS[name].model_type, {**VARIANTS[name].changes, "moe_intermediate_size": 64}))
    write_gguf(tmp_path / "codes.gguf", tmp_path, lambda _: type_name)
    files = open_checkpoint(tmp_path / "codes.gguf")
    with files.open(tmp_path / "codes.gguf") as file:
        for each, info in files.tensors.items():
            whole = file.read(each, ())
            assert whole.shape == info.shape
            if info.form is not None:
                torch.testing.assert_close(file.read_codes(each, ()).dequantized(), whole, rtol=0, atol=0)
                part = (slice(32, 64), slice(32, 64))
                assert torch.equal(file.read(each, part), whole[part])
                assert torch.equal(file.read_codes(each, part).dequantized(), whole[part])
    assert loaded(tmp_path / "codes.gguf").isfinite().all()


def test_scales_of_another_rope_are_refused(tmp_path: Path) -> None:
    rope = VARIANTS["llama3.1"].changes  # its length before scaling is 64
    write_checkpoint(tmp_path, Variant("llama", {**rope, "head_dim": 16}))
    write_gguf(tmp_path / "model.gguf", tmp_path)
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight are not those of Llama 3\.1's scaling"):
        load_model_config(tmp_path / "model.gguf")


HUGE = 1 << 60
ARCHITECTURE = entry("general.architecture", 8, text("llama"))
DAMAGED = {
    "no GGUF": (b"PK\3\4" + bytes(60), "is not a GGUF file"),
    "empty": (b"", "is empty; download it again"),
    "cut in the header": (b"GGUF\3\0\0", "the header goes beyond the end"),
    "another version": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "2^60 entries": (header(entry_count=HUGE), f"{HUGE} entries goes beyond the end"),
    "2^60 tensors": (header(tensor_count=HUGE), f"{HUGE} tensors goes beyond the end"),
    "a name of 2^60 bytes": (header(entries=struct.pack("<Q", HUGE) + bytes(40)), f"a string of {HUGE} bytes"),
    "an array of 2^40 numbers": (
        header(entries=entry("a", 9, struct.pack("<IQ", 4, 1 << 40)) + bytes(64)),
        f"a: {1 << 40} numbers goes beyond the end",
    ),
    "an array of 2^40 strings": (
        header(entries=entry("a", 9, struct.pack("<IQ", 8, 1 << 40)) + bytes(64)),
        f"a: {1 << 40} strings goes beyond the end",
    ),
    "a string of an array past the end": (
        header(entries=entry("a", 9, struct.pack("<IQQ", 8, 1, HUGE)) + bytes(64)),
        "a goes beyond the end",
    ),
    "an array of arrays": (header(entries=entry("a", 9, struct.pack("<IQ", 9, 1)) + bytes(64)), "an array of the type 9"),
    "an unknown type": (header(entries=entry("a", 77, b"") + bytes(64)), "a has the unknown type 77"),
    "not UTF-8": (header(entries=struct.pack("<Q", 2) + b"\xff\xfe" + bytes(64)), "entry 0 is not UTF-8"),
    "an offset past the end": (header(tensors=tensor("t", (4, 32), offset=1 << 50)), r"t \[4, 32\] goes beyond the end"),
    "half a file": (header(tensors=tensor("t", (64, 32))) + bytes(100), r"t \[64, 32\] goes beyond the end"),
    "a shape of 2^60": (header(tensors=tensor("t", (HUGE, HUGE))), "goes beyond the end"),
    "no elements, and 2^60 experts": (header(tensors=tensor("t", (HUGE, 0, 32))), r"t \[\d+, 0, 32\] is empty"),
    "9 dimensions": (header(tensors=tensor("t", (1,) * 9)), "t has 9 dimensions"),
    "rows of half a block": (header(tensors=tensor("t", (4, 48), 2)), r"t \[4, 48\] has rows that are no whole blocks of Q4_0"),
    "overlapping tensors": (
        header(tensors=tensor("t", (4, 32)) + tensor("u", (4, 32), offset=64), tensor_count=2) + bytes(2000),
        "t and u overlap",
    ),
    "a tensor twice": (header(tensors=tensor("t", (4,)) * 2, tensor_count=2) + bytes(2000), "t occurs twice"),
    "not aligned": (header(tensors=tensor("t", (4,), offset=3)) + bytes(200), "t is not aligned"),
    "an alignment of 0": (
        header(entries=entry("general.alignment", 4, struct.pack("<I", 0)), tensors=tensor("t", (4,))),
        "general.alignment is 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    data, message = DAMAGED[name]
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=message) as caught:
        GgufFile(tmp_path / "model.gguf")
    assert str(tmp_path / "model.gguf") in str(caught.value)


@pytest.mark.parametrize("number", OTHER_TYPES)
def test_types_that_cannot_be_read_are_named(number: int, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(header(tensors=tensor("t", (4, 256), number)) + bytes(4096))
    with pytest.raises(ModelError, match=f"t has the type {OTHER_TYPES[number]}, which cannot be read; readable are F32, F16"):
        GgufFile(tmp_path / "model.gguf")


def test_all_types_are_known_by_their_name_and_size() -> None:
    known = {each.value: each.name for each in gguf.GGMLQuantizationType}
    for number, block in BLOCK_TYPES.items():
        assert (known[number], (block.elements, block.size)) == (
            block.name,
            gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)],
        )
    assert all(known.get(number, name) == name for number, name in OTHER_TYPES.items())


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (b"", "general.architecture is missing"),
        (
            entry("general.architecture", 8, text("bloom")),
            "'bloom' is not supported; supported: apertus, arcee, bert, .*, starcoder2$",
        ),
        (
            entry("general.architecture", 8, text("gemma3n")),
            "'gemma3n' is not supported; the nearest is gemma3; supported: apertus, arcee, bert, .*, starcoder2$",
        ),
        (ARCHITECTURE + entry("general.type", 8, text("adapter")), "general.type is 'adapter', and only a model can be served"),
        (ARCHITECTURE, "llama.attention.head_count must be a number above 0, got None"),
        (ARCHITECTURE + entry("llama.attention.head_count", 8, text("9")), "head_count must be a number above 0, got '9'"),
        (ARCHITECTURE + entry("llama.attention.head_count", 4, struct.pack("<I", 0)), "head_count must be a number above 0, got 0"),
        *(
            (ARCHITECTURE + entry("split.count", *written), r"model\.gguf: split\.count must be an integer from 1 to 99999")
            for written in (
                (9, struct.pack("<IQI", 4, 1, 1)),
                (8, text("1")),
                (5, struct.pack("<i", -1)),
                (4, struct.pack("<I", 100_000)),
                (6, struct.pack("<f", 1.0)),
            )
        ),
        (
            ARCHITECTURE + entry("split.count", 2, struct.pack("<H", 3)),
            r"split\.count is 3, and there are 1 by its name; .* -00001-of-00003",
        ),
    ],
    ids=[
        *("nothing", "another architecture", "a nearer one", "an adapter", "no sizes", "a size that is text", "a size of 0"),
        *(f"a count of parts that is {what}" for what in ("a list", "text", "below 0", "too large", "a fraction")),
        "a part of a model",
    ],
)
def test_what_the_metadata_lacks_is_named(entries: bytes, message: str, tmp_path: Path) -> None:
    count = sum(entries.count(each) for each in (b"general", b"split", b"head_count"))
    (tmp_path / "model.gguf").write_bytes(header(entries=entries, entry_count=count))
    with pytest.raises(ModelError, match=message):
        load_model_config(tmp_path / "model.gguf")


def test_a_tensor_of_another_shape_or_name_is_named(tmp_path: Path) -> None:
    data = file_of("qwen3", tmp_path)
    (tmp_path / "other.gguf").write_bytes(data.replace(b"blk.1.ffn_up", b"blk.1.ffn_ip"))
    with pytest.raises(WeightError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        loaded(tmp_path / "other.gguf")
    described = tensor("blk.1.ffn_up.weight", (128, 64))
    at = data.index(text("blk.1.ffn_up.weight"))
    wrong = tensor("blk.1.ffn_up.weight", (64, 128))
    (tmp_path / "wrong.gguf").write_bytes(data[:at] + wrong[:-12] + data[at + len(described) - 12 :])
    with pytest.raises(WeightError, match=r"up_proj\.weight \[64, 128\] \(expected \[128, 64\]\) has the wrong shape"):
        loaded(tmp_path / "wrong.gguf")


def test_a_vector_in_codes_is_named(tmp_path: Path) -> None:
    data = file_of("qwen3", tmp_path)
    plain, coded = tensor("output_norm.weight", (64,)), tensor("output_norm.weight", (64,), 8)
    at = data.index(plain[:-12])
    (tmp_path / "model.gguf").write_bytes(data[:at] + coded[:-8] + data[at + len(coded) - 8 :])
    with pytest.raises(WeightError, match=r"model\.norm\.weight \(Q8_0\) has a dtype that cannot be loaded"):
        loaded(tmp_path / "model.gguf")


def test_other_experts_than_the_config_has_are_named(tmp_path: Path) -> None:
    data = file_of("mixtral", tmp_path)
    count = text("llama.expert_count") + struct.pack("<II", 4, 4)
    assert count in data
    (tmp_path / "model.gguf").write_bytes(data.replace(count, count[:-4] + struct.pack("<I", 3)))
    with pytest.raises(WeightError, match=r"blk\.0\.ffn_\w+_exps\.weight \[4, .*\] has 4 experts \(expected 3\)"):
        open_checkpoint(tmp_path / "model.gguf")


TOKENS = [entry("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b"))]
BPE = [entry("tokenizer.ggml.model", 8, text("gpt2")), *TOKENS]
PIECES = [entry("tokenizer.ggml.model", 8, text("llama")), *TOKENS]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([*BPE, entry("tokenizer.ggml.pre", 9, struct.pack("<IQ", 4, 0))], r"tokenizer\.ggml\.pre \[\] is not supported"),
        (
            [*PIECES, entry("tokenizer.ggml.scores", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b"))],
            r"tokenizer\.ggml\.scores does not hold a number for each token",
        ),
    ],
    ids=["a list as a rule", "texts as scores"],
)
def test_a_vocabulary_of_other_types_is_named(entries: list[bytes], message: str, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(header(entries=b"".join(entries), entry_count=len(entries)))
    with pytest.raises(ModelError, match=message):
        read_gguf_tokenizer(GgufFile(tmp_path / "model.gguf"))


def parts(folder: Path) -> list[Path]:
    """Writes a model into several files, each with one tensor, so that halves of a matrix are in two of them."""
    write_checkpoint(folder, VARIANTS["deepseek-v3-dense"])
    convert(folder / "large.gguf", folder, split_max_tensors=1)
    return sorted(folder.glob("large-*-of-*.gguf"))


def test_several_files_are_the_model_of_one(tmp_path: Path) -> None:
    found = parts(tmp_path)
    convert(tmp_path / "model.gguf", tmp_path)
    torch.testing.assert_close(loaded(found[0]), loaded(tmp_path / "model.gguf"), rtol=0, atol=0)
    assert len(open_gguf(found[0]).header_bytes) > len(open_gguf(tmp_path / "model.gguf").header_bytes)
    assert fingerprint_of(str(found[0]), "auto", 0, "float32") != fingerprint_of(str(tmp_path / "model.gguf"), "auto", 0, "float32")


def test_files_of_several_that_do_not_fit_are_named(tmp_path: Path) -> None:
    found = parts(tmp_path)
    count = len(found)
    with pytest.raises(ModelError, match=rf"is file 2 of {count} of a model; name the first one, large-00001-of-"):
        load_model_config(found[1])
    found[1].write_bytes(found[2].read_bytes())
    with pytest.raises(
        ModelError, match=rf"large-00002-of-.*: split\.no and split\.count are \(2, {count}\); expected \(1, {count}\)"
    ):
        load_model_config(found[0])
    (first,) = GgufFile(found[0]).tensors
    entries = entry("split.no", 2, struct.pack("<H", 1)) + entry("split.count", 2, struct.pack("<H", count))
    found[1].write_bytes(header(entries=entries, entry_count=2, tensors=tensor(first, (1,))).ljust(1 << 12, b"\0"))
    with pytest.raises(ModelError, match=rf"large-00002-of-.*: {re.escape(first)} is in a file before it, too"):
        load_model_config(found[0])
    found[1].unlink()
    with pytest.raises(ModelError, match=r"cannot be read: .*large-00002-of-"):
        load_model_config(found[0])


def test_a_file_that_changed_is_not_read(tmp_path: Path) -> None:
    file_of("qwen3", tmp_path)
    files = open_checkpoint(tmp_path / "model.gguf")
    with (tmp_path / "model.gguf").open("ab") as file:
        file.write(b"more")
    with pytest.raises(WeightError, match=r"model\.gguf has changed"), files.open(tmp_path / "model.gguf"):
        pass


ROPES = {
    "a factor alone": ({"scaling.factor": 4.0}, LinearScaling(factor=4.0)),
    "an old name": ({"scale_linear": 4.0}, LinearScaling(factor=4.0)),
    "a factor of 1": ({"scaling.factor": 1.0}, None),
    "yarn": (
        {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 512, "scaling.yarn_beta_fast": 16.0},
        YarnScaling(factor=4.0, original_max_position=512, beta_fast=16.0),
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_a_scaling_of_rope_is_read(name: str, tmp_path: Path) -> None:
    fields, expected = ROPES[name]
    assert config_with(tmp_path, {f"rope.{key}": value for key, value in fields.items()}).ropes[0].scaling == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, "mean"), ({"pooling_type": gguf.PoolingType.LAST}, "last"), ({"pooling_type": gguf.PoolingType.CLS}, "cls")],
)
def test_how_vectors_are_made_is_read(fields: dict[str, Any], expected: str, tmp_path: Path) -> None:
    assert config_with(tmp_path, {name: int(value) for name, value in fields.items()}).pooler.pooling == expected


def test_of_numbers_in_the_metadata_none_are_taken_beyond_the_layers(tmp_path: Path) -> None:
    """They are parameters of Apertus' activation, and of no other family."""
    numbers = entry("xielu.beta", 9, struct.pack("<IQ3f", 6, 3, 1, 2, 3))
    config_with(tmp_path, {})
    data = (tmp_path / "model.gguf").read_bytes()
    (count,) = struct.unpack_from("<Q", data, 16)
    (tmp_path / "model.gguf").write_bytes(data[:16] + struct.pack("<Q", count + 1) + data[24:] + numbers)
    file = GgufFile(tmp_path / "model.gguf")
    assert [struct.unpack("<f", file.read(each)) for each in file.numbers_of("xielu.beta", 2)] == [(1,), (2,)]
    assert open_checkpoint(tmp_path / "model.gguf").tensors == {}


def test_short_factors_alone_are_no_scaling(tmp_path: Path) -> None:
    """A file that lost its long factors is not read as one that has no scaling."""
    (tmp_path / "model.gguf").write_bytes(header(tensors=tensor(SHORT_FACTORS, (1,)).ljust(256, b"\0")))
    with pytest.raises(ModelError, match=rf"model\.gguf: {LONG_FACTORS} is missing"):
        read_scaling(GgufMetadata(GgufFile(tmp_path / "model.gguf")))


def test_a_list_is_no_way_to_make_vectors(tmp_path: Path) -> None:
    entries = ARCHITECTURE + entry("llama.pooling_type", 9, struct.pack("<IQI", 4, 1, 3))
    (tmp_path / "model.gguf").write_bytes(header(entries=entries, entry_count=2))
    assert read_pooling(GgufFile(tmp_path / "model.gguf")) is None


def config_with(folder: Path, fields: dict[str, Any]) -> ModelConfig:
    """The config of a file that has these fields of its architecture besides those that it needs."""
    sizes = ("embedding_length", "block_count", "feed_forward_length", "context_length", "attention.head_count", "vocab_size")
    needed = {**dict.fromkeys(sizes, 64), "attention.layer_norm_rms_epsilon": 1e-5, "attention.key_length": 64}
    entries = [ARCHITECTURE, *(typed_entry(f"llama.{key}", value) for key, value in {**needed, **fields}.items())]
    (folder / "model.gguf").write_bytes(header(entries=b"".join(entries), entry_count=len(entries)))
    return load_model_config(folder / "model.gguf")


def test_scales_beyond_float16_are_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, VARIANTS["qwen3"])
    write_gguf(tmp_path / "model.gguf", tmp_path, lambda name: "MXFP4" if name == "blk.0.ffn_up.weight" else "F32")
    found = GgufFile(tmp_path / "model.gguf").tensors["blk.0.ffn_up.weight"]
    data = bytearray((tmp_path / "model.gguf").read_bytes())
    data[found.start] = 200
    (tmp_path / "model.gguf").write_bytes(data)
    files = open_checkpoint(tmp_path / "model.gguf")
    name = "model.layers.0.mlp.up_proj.weight"
    assert files.tensors[name].form == Format(4, table=FORMATS["MXFP4"].table)
    with files.open(tmp_path / "model.gguf") as file, pytest.raises(WeightError, match="scales that float16 cannot hold"):
        file.read_codes(name, ())
