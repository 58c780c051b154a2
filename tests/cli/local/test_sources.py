"""Meaning of file:// and pvc:// without a cluster."""

import pytest
from starling_cli.local.sources import PathMap, SourceError, claim_folder, default_maps, local_model, map_path, parse_map


@pytest.fixture
def models(tmp_path):
    (tmp_path / "models" / "small").mkdir(parents=True)
    return tmp_path / "models"


def test_a_path_that_is_here_stays(models):
    assert map_path(str(models), [PathMap(str(models), models / "small")]) == models


def test_a_prefix_is_replaced(models):
    assert map_path("/opt/x/small", [PathMap("/opt/x", models)]) == models / "small"
    assert map_path("/opt/x", [PathMap("/opt/x", models)]) == models
    assert map_path("/small", [PathMap("/", models)]) == models / "small"


def test_only_whole_names_are_a_prefix(models):
    with pytest.raises(SourceError):
        map_path("/opt/xy/small", [PathMap("/opt/x", models)])


def test_the_first_mapping_that_leads_somewhere_wins(models, tmp_path):
    assert map_path("/m/small", [PathMap("/m", tmp_path / "none"), PathMap("/m", models)]) == models / "small"


def test_tried_paths_are_named(models):
    with pytest.raises(SourceError, match=r"/m/large.*models/large.*--map /m/large=FOLDER"):
        map_path("/m/large", [PathMap("/m", models)])


def test_a_claim_needs_a_folder(models):
    assert claim_folder("weights", [PathMap("pvc://weights", models)]) == models
    with pytest.raises(SourceError, match="--map pvc://other=FOLDER"):
        claim_folder("other", [PathMap("pvc://weights", models)])


@pytest.mark.parametrize("source", ["hf://org/name", "pvc://weights/small", "file:///m/small"])
def test_sources_that_can_be_had(models, source):
    local_model(source, [PathMap("pvc://weights", models), PathMap("/m", models)])


@pytest.mark.parametrize("source", ["pvc://none/small", "pvc://weights/large", "file:///nowhere/at/all"])
def test_sources_that_cannot(models, source):
    with pytest.raises(SourceError):
        local_model(source, [PathMap("pvc://weights", models)])


@pytest.mark.parametrize("text", ["", "a", "a=b", "=x", "/a=", "pvc://=.", "pvc://a/b=.", "/a=/no/such/folder"])
def test_no_mappings(text):
    with pytest.raises(ValueError, match=r"is no mapping|there is no folder"):
        parse_map(text)


def test_mappings(models, monkeypatch):
    monkeypatch.chdir(models.parent)
    assert parse_map("/opt/x/=models") == PathMap("/opt/x", models)
    assert parse_map("pvc://weights=./models") == PathMap("pvc://weights", models)


def test_the_images_models_are_found_in_a_clone(tmp_path):
    (tmp_path / "clone" / "models" / "starling-pydoc").mkdir(parents=True)
    manifest = tmp_path / "clone" / "examples" / "a.yaml"
    path = "/opt/starling/models/starling-pydoc"
    for here in (tmp_path / "clone", tmp_path):
        assert map_path(path, default_maps(manifest, here)) == tmp_path / "clone" / "models" / "starling-pydoc"
