"""Writes what is made from elsewhere: the chart's copy of the CRD (from crds/), and deploy/starling.yaml (from the chart).

    python charts/tools/generate.py            write
    python charts/tools/generate.py --check    exit 1 and name the files that are not up to date

The chart holds a copy of the CRD because `helm package` takes only what lies in its folder.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/starling"
NAMESPACE = "starling-system"
HEADER = """\
# The Starling operator in the namespace starling-system, for all namespaces. Generated from charts/starling; do not edit.
#
#   kubectl apply --server-side -f deploy/starling.yaml
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file would change")
    check = parser.parse_args().check
    stale = _sync(_crd_copies(), check)
    stale += _sync({ROOT / "deploy/starling.yaml": _plain_manifests()}, check)
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is not up to date; run make manifests' if check else 'written'}")
    return 1 if check and stale else 0


def _sync(wanted: dict[Path, str | None], check: bool) -> list[Path]:
    """The files that differ from what is wanted (None: no file); they are written unless only checked."""
    stale = [path for path, text in wanted.items() if (path.read_text() if path.exists() else None) != text]
    for path in [] if check else stale:
        text = wanted[path]
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
    return stale


def _crd_copies() -> dict[Path, str | None]:
    generated = sorted((ROOT / "crds").glob("*.yaml"))
    if not generated:
        sys.exit("crds/ holds no *.yaml; write them first: python -m starling_crds")
    folder = CHART / "files/crds"
    folder.mkdir(parents=True, exist_ok=True)
    no_longer: dict[Path, str | None] = dict.fromkeys(folder.glob("*.yaml"))
    return no_longer | {folder / path.name: path.read_text() for path in generated}


def _plain_manifests() -> str:
    helm = subprocess.run([ROOT / "charts/tools/install-helm.sh"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    command = [helm, "template", "starling", CHART, "--namespace", NAMESPACE]
    rendered = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    objects = [_namespace(), *map(_without_helm, filter(None, yaml.safe_load_all(rendered)))]
    return HEADER + "".join("---\n" + yaml.safe_dump(item, sort_keys=False, width=130, allow_unicode=True) for item in objects)


def _namespace() -> dict[str, Any]:
    labels = {"app.kubernetes.io/part-of": "starling", "pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}


def _without_helm(value: Any) -> Any:
    """Labels and annotations that say that Helm manages an object would be untrue."""
    if isinstance(value, list):
        return [_without_helm(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: _without_helm(item) for key, item in value.items() if not _is_helms(key, item)}
    return {key: item for key, item in kept.items() if item != {} or value[key] == {}}


def _is_helms(key: str, value: Any) -> bool:
    return key.startswith("helm.sh/") or (key == "app.kubernetes.io/managed-by" and value == "Helm")


if __name__ == "__main__":
    sys.exit(main())
