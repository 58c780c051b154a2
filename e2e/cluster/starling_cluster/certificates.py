"""The certificates of a control plane, made by openssl: one authority, the API server's own, and its client for kubelets."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from starling_cluster.errors import HarnessError
from starling_cluster.place import Place

DAYS = "30"
NAMES = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", "localhost")
KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True)
class Certificates:
    """Files of the folder `pki`."""

    folder: Path

    def file(self, name: str) -> str:
        return str(self.folder / name)


def make(place: Place, addresses: list[str]) -> Certificates:
    """For an API server that is reached at these IP addresses."""
    made = Certificates(place.make("pki"))
    out = ("-keyout", made.file("ca.key"), "-out", made.file("ca.crt"))
    _openssl("req", "-x509", *KEY, *out, "-subj", "/CN=starling-e2e", "-days", DAYS)
    alternatives = [f"IP:{address}" for address in addresses] + [f"DNS:{name}" for name in NAMES]
    _sign(made, "api", "/CN=kube-apiserver", f"subjectAltName={','.join(alternatives)}")
    _sign(made, "kubelet-client", "/O=system:masters/CN=apiserver-kubelet-client", "extendedKeyUsage=clientAuth")
    # Signs the tokens of service accounts.
    _openssl("genrsa", "-out", made.file("accounts.key"), "2048")
    return made


def _sign(made: Certificates, name: str, subject: str, extension: str) -> None:
    key, request, certificate = (made.file(f"{name}.{ending}") for ending in ("key", "csr", "crt"))
    extensions = made.folder / f"{name}.ext"
    extensions.write_text(extension + "\n")
    _openssl("req", *KEY, "-keyout", key, "-out", request, "-subj", subject)
    authority = ("-CA", made.file("ca.crt"), "-CAkey", made.file("ca.key"), "-CAcreateserial")
    _openssl("x509", "-req", "-in", request, *authority, "-days", DAYS, "-extfile", str(extensions), "-out", certificate)


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HarnessError(f"openssl {arguments[0]} failed: {done.stderr.strip()}")
