"""Certificates for tests, made by openssl."""

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Returns the files of a certificate and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl to make a certificate")
    certificate, key = folder / "tls.crt", folder / "tls.key"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=chat", "-days", "1"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return certificate, key
