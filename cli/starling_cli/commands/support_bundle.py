"""`starling support-bundle`: one file to attach to a bug report."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from starling_cli.commands.failures import fail
from starling_cli.commands.flags import Context, Kubeconfig, Namespace, connected

if TYPE_CHECKING:
    from starling_cli.bundling.collect import Bundle

ABOUT = """What `starling support-bundle` found about InferenceService {name} in namespace {namespace} at {time}.

Left out: the data of Secrets, values of environment variables whose names sound secret, and managed fields.
Logs are the last {lines} lines of each pod. Look through them before you pass this on: names, hosts and, where
logging of requests or prompts was turned on, what users wrote may be in them.

"""


def support_bundle(
    name: Annotated[str, typer.Argument(help="The InferenceService.")],
    file: Annotated[Path | None, typer.Option("--file", help="Default: starling-NAME-TIME.tar.gz in this folder.")] = None,
    log_lines: Annotated[int, typer.Option("--log-lines", min=1, help="Of each pod's log, from its end.")] = 5000,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Gather a service, its children (no Secret's data), pods' logs, events, reports and versions in a .tar.gz."""
    from starling_cli.bundling.collect import collect, contents
    from starling_cli.cluster.service_view import utc_now

    now = utc_now()
    target = file or Path(f"starling-{name}-{now:%Y%m%dT%H%M%SZ}.tar.gz")
    if target.exists():
        fail(f"{target} exists", "name another --file")
    with connected(kubeconfig, context, namespace) as cluster:
        bundle = collect(cluster, name, log_lines)
        listed = "\n".join(contents(bundle))
        about = ABOUT.format(name=name, namespace=cluster.namespace, time=f"{now:%Y-%m-%d %H:%M:%S} UTC", lines=log_lines)
    bundle.files["README.txt"] = f"{about}{listed}\n"
    try:
        _write(target, bundle)
    except OSError as error:
        fail(f"{target} cannot be written: {error.strerror}", "name another --file")
    typer.echo(f"{listed}\nwrote {target} ({target.stat().st_size} bytes). {_CARE}")


_CARE = "No Secret's data is in it; look through the logs before you pass it on."


def _write(target: Path, bundle: "Bundle") -> None:
    import io
    import tarfile
    import time

    folder = target.name.removesuffix(".tar.gz")
    with tarfile.open(target, "x:gz") as archive:
        for path, text in sorted(bundle.files.items()):
            entry = tarfile.TarInfo(f"{folder}/{path}")
            entry.size = len(data := text.encode())
            entry.mode, entry.mtime = 0o600, int(time.time())
            archive.addfile(entry, io.BytesIO(data))
    target.chmod(0o600)
