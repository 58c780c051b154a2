"""Resolving a model's name to its folder: local folders, and repositories from a hub over its real protocol."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from starling_engine.errors import ModelError
from starling_engine.weights.hub import resolve_model, split_name

from tests.agent.node.hub import COMMIT, Hub, running_hub

MODULES = {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"}
WANTED = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "tokenizer.model", *MODULES}
GGUF = {"model-Q4_0.gguf", "folder/model-Q8_0.gguf"}
PARTS = {"folder/large-00001-of-00002.gguf", "folder/large-00002-of-00002.gguf"}
UNWANTED = (
    GGUF | PARTS | {"pytorch_model.bin", "modeling.py", "consolidated.safetensors", "onnx/config.json", "2_Dense/pytorch_model.bin"}
)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "repository"
    for name in WANTED | UNWANTED:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"content of {name}")
    with running_hub(folder) as running:
        yield running


def resolve(name: str, cache: Path, endpoint: str, revision: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """`resolve_model` in a process of its own, for huggingface_hub reads its environment when it is imported."""
    code = (
        "import sys\n"
        "from starling_engine.errors import ModelError\n"
        "from starling_engine.weights.hub import resolve_model\n"
        "try: print(resolve_model(sys.argv[1], sys.argv[2] or None))\n"
        "except ModelError as error: sys.exit(f'ModelError: {error}')\n"
    )
    settings = {
        "HF_HOME": str(cache),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "*",
        **env,
    }
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-c", code, name, revision or ""],
        env={**inherited, **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(("name", "revision"), [("org/name", None), ("org/name@v1", None), ("org/name", "v1")])
def test_downloads_what_serving_needs_and_nothing_else(name: str, revision: str | None, hub: Hub, tmp_path: Path) -> None:
    done = resolve(name, tmp_path / "cache", hub.url, revision)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.name == COMMIT
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == WANTED == set(hub.downloads)
    assert (folder / "config.json").read_text() == "content of config.json"


@pytest.mark.parametrize("file", sorted(GGUF))
@pytest.mark.parametrize(("scheme", "revision"), [("", ""), ("hf://", "@v1")])
def test_of_a_gguf_model_one_file_is_downloaded(file: str, scheme: str, revision: str, hub: Hub, tmp_path: Path) -> None:
    done = resolve(f"{scheme}org/name:{file}{revision}", tmp_path / "cache", hub.url)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert path.read_text() == f"content of {file}" and hub.downloads == [file]
    name = split_name(f"org/name:{file}{revision}")
    assert name.snapshot(path).name == COMMIT and name.revision == (revision[1:] or None)


def test_of_a_gguf_model_in_several_files_all_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    done = resolve("org/name:folder/large-00001-of-00002.gguf", tmp_path / "cache", hub.url)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_text() == "content of folder/large-00001-of-00002.gguf"
    assert sorted(hub.downloads) == sorted(PARTS)
    refused = resolve("org/name:folder/large-00002-of-00002.gguf", tmp_path / "cache", hub.url)
    assert "is file 2 of 2 of a model; name the first one, large-00001-of-00002.gguf" in refused.stderr
    assert "no such file" in resolve("org/name:model-00001-of-00001.gguf", tmp_path / "cache", hub.url).stderr


@pytest.mark.parametrize("revision", ["", "@main"])
def test_files_of_a_model_are_of_one_commit_though_the_branch_moves(revision: str, hub: Hub, tmp_path: Path) -> None:
    hub.moves_with_downloads = True
    done = resolve(f"org/name:folder/large-00001-of-00002.gguf{revision}", tmp_path / "cache", hub.url)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in Path(done.stdout.strip()).parent.iterdir()} == {Path(each).name for each in PARTS}
    assert len(hub.commits) == 3 and COMMIT in done.stdout


@pytest.mark.parametrize(
    ("file", "fault"),
    [
        ("large-00001-of-99999.gguf", "is file 1 of 99999 of a model; at most 1000 are read"),
        ("large-00001-of-01001.gguf", "is file 1 of 1001 of a model; at most 1000 are read"),
        ("large-00000-of-00002.gguf", "is file 0 of 2 of a model"),
    ],
)
def test_a_name_of_too_many_files_is_refused(file: str, fault: str) -> None:
    with pytest.raises(ModelError, match=fault):
        split_name(f"org/name:{file}")
    assert len(split_name("org/name:large-00001-of-01000.gguf").parts) == 1000
    assert split_name("org/name:large-٠٠٠٠١-of-٠٠٠٠٢.gguf").parts == ["large-٠٠٠٠١-of-٠٠٠٠٢.gguf"]


def test_the_cache_serves_without_a_hub(hub: Hub, tmp_path: Path) -> None:
    first = resolve("org/name", tmp_path / "cache", hub.url)
    lookups, hub.downloads[:] = hub.lookups, []
    offline = resolve("org/name", tmp_path / "cache", hub.url, HF_HUB_OFFLINE="1")
    assert offline.stdout == first.stdout and offline.returncode == 0, offline.stderr
    assert hub.lookups == lookups
    again = resolve("org/name", tmp_path / "cache", hub.url)
    assert again.stdout == first.stdout
    assert hub.downloads == []


@pytest.mark.parametrize(
    ("name", "env", "words"),
    [
        ("org/name@v9", {}, ["org/name", "no revision v9"]),
        ("org/name:absent.gguf", {}, ["org/name has no such file", "absent.gguf"]),
        ("org/name:absent.gguf", {"HF_HUB_OFFLINE": "1"}, ["org/name", "not in the cache"]),
        ("org/absent", {}, ["org/absent", "no such repository", "HF_TOKEN"]),
        ("org/gated", {}, ["org/gated", "gated", "HF_TOKEN"]),
        ("org/name", {"HF_HUB_OFFLINE": "1"}, ["org/name", "not in the cache", "HF_HUB_OFFLINE"]),
        ("org/name", {"HF_ENDPOINT": "http://127.0.0.1:9"}, ["org/name", "cannot be reached"]),
    ],
)
def test_says_why_a_model_is_not_to_be_had(name: str, env: dict[str, str], words: list[str], hub: Hub, tmp_path: Path) -> None:
    done = resolve(name, tmp_path / "cache", hub.url, **env)
    assert done.returncode == 1
    assert "ModelError: " in done.stderr, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def test_a_local_file_wins(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("")
    assert resolve_model(str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"


def test_a_local_folder_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name") == Path("org/name")
    assert resolve_model(str(tmp_path / "org/name")) == tmp_path / "org/name"


@pytest.mark.parametrize("name", ["/no/such/folder", "./models/x", "a/b/c", "org/name@", "models/../x"])
def test_a_name_that_is_neither_is_refused_without_asking_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match="neither a folder nor a GGUF file here, nor"):
        resolve_model(name)


def test_two_revisions_are_refused() -> None:
    with pytest.raises(ModelError, match="v1 and v2"):
        resolve_model("org/name@v1", "v2")
