#!/bin/sh
# Builds the Helm that tests and the end-to-end run use, once, and prints its path.
#
# Helm is built from its Go module, whose content Go checks against its checksum database; that takes about four minutes of CPU the
# first time and nothing after. Two callers at once wait for each other. HELM=/path/to/helm uses that one instead.
#
#   charts/tools/install-helm.sh            -> /root/.cache/starling/bin/helm-4.3.1
set -eu

VERSION=4.3.1
BIN="${STARLING_CACHE:-$HOME/.cache/starling}/bin"
TARGET="$BIN/helm-$VERSION"

if [ -n "${HELM:-}" ]; then
    test -x "$HELM" || { echo "HELM=$HELM is no program; unset it to have Helm $VERSION built" >&2; exit 1; }
    echo "$HELM"
    exit 0
fi
if [ ! -x "$TARGET" ]; then
    command -v go >/dev/null || { echo "building Helm needs Go 1.26 or newer; or name a Helm 4 with HELM=/path/to/helm" >&2; exit 1; }
    mkdir -p "$BIN"
    exec 9>"$BIN/.helm.lock"
    flock 9
    if [ ! -x "$TARGET" ]; then
        echo "building Helm $VERSION into $BIN (two to four minutes, once)" >&2
        work=$(mktemp -d "$BIN/.helm.XXXXXX")
        trap 'rm -rf "$work"' EXIT
        # Compiled as Kubernetes is, see e2e/cluster/starling_cluster/go_builds.py.
        export GOBIN="$work" GOGC="${GOGC:-400}"
        nice -n 10 go install -trimpath -gcflags=all=-dwarf=false -ldflags "-s -w" "helm.sh/helm/v4/cmd/helm@v$VERSION" >&2
        # Renamed last, so that a build that was interrupted leaves nothing that looks whole.
        mv "$work/helm" "$TARGET"
    fi
fi
ln -sfn "helm-$VERSION" "$BIN/helm"
echo "$TARGET"
