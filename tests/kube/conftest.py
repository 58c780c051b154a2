"""Makes the fixture known to the tests of this folder."""

from tests.kube.apiserver import apiserver

__all__ = ["apiserver"]
