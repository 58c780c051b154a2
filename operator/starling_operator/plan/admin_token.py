"""Token of a service's admin endpoints, and the Secret from which its pods mount it.

The token follows from the operator's key and the service's UID, so the operator never reads a Secret of a service. The Secret's
name has a digest of the token: if it exists, it holds this token. Another key, or another service of that name, gives another one.
"""

import base64
import hashlib
import hmac

from starling_operator.plan import names
from starling_operator.plan.config import TOKEN_KEY
from starling_operator.plan.labels import child
from starling_operator.plan.observed import Manifest, Service

TOKEN_VOLUME = "admin"


def token_of(key: bytes, service: Service) -> str:
    """Returns 64 hexadecimal digits."""
    return hmac.new(key, f"{service.namespace}/{service.uid}".encode(), hashlib.sha256).hexdigest()


def secret_name(service: str, token: str) -> str:
    return names.with_digest(f"{service}-token", token)


def token_secret(service: Service, token: str) -> Manifest:
    return secret_with(service, secret_name(service.name, token), token)


def secret_with(service: Service, name: str, token: str) -> Manifest:
    """Makes a Secret of a name that has a digest of the token."""
    made = child(service, "v1", "Secret", name)
    return made | {"type": "Opaque", "immutable": True, "data": {TOKEN_KEY: base64.b64encode(token.encode()).decode()}}


def with_token(service: Service, template: Manifest, token: str) -> Manifest:
    """Adds the token's Secret to a template. It is no part of a revision: pods that are recreated mount the present one."""
    volumes = [volume for volume in template["spec"].get("volumes") or () if volume["name"] != TOKEN_VOLUME]
    mounted = {"name": TOKEN_VOLUME} | mounted_token(secret_name(service.name, token))
    return template | {"spec": template["spec"] | {"volumes": [*volumes, mounted]}}


def mounted_token(secret: str) -> Manifest:
    """Returns the source of a volume with the token of this Secret."""
    return {"secret": {"secretName": secret, "items": [{"key": TOKEN_KEY, "path": TOKEN_KEY}]}}
