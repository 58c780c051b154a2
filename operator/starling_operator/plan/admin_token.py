"""Token of a service's admin endpoints, and the Secret from which its pods mount it.

The token follows from the operator's key and the service's UID, so the operator never reads a Secret of a service. The Secret's
name has a digest of the token: if it exists, it holds this token. Another key, or another service of that name, gives another one.
"""

import base64
import hashlib
import hmac

from starling_operator.plan.config import TOKEN_KEY
from starling_operator.plan.labels import child
from starling_operator.plan.observed import Manifest, Service

TOKEN_VOLUME = "admin"


def token_of(key: bytes, service: Service) -> str:
    """Returns 64 hexadecimal digits."""
    return hmac.new(key, f"{service.namespace}/{service.uid}".encode(), hashlib.sha256).hexdigest()


def secret_name(service: str, token: str) -> str:
    return f"{service}-token-{hashlib.sha256(token.encode()).hexdigest()[:8]}"


def token_secret(service: Service, token: str) -> Manifest:
    made = child(service, "v1", "Secret", secret_name(service.name, token))
    return made | {"type": "Opaque", "immutable": True, "data": {TOKEN_KEY: base64.b64encode(token.encode()).decode()}}


def with_token(service: Service, template: Manifest, token: str) -> Manifest:
    """Adds the token's Secret to a template. It is no part of a revision: pods that are recreated mount the present one."""
    source = {"secretName": secret_name(service.name, token), "items": [{"key": TOKEN_KEY, "path": TOKEN_KEY}]}
    volumes = [volume for volume in template["spec"].get("volumes") or () if volume["name"] != TOKEN_VOLUME]
    mounted = {"name": TOKEN_VOLUME, "secret": source}
    return template | {"spec": template["spec"] | {"volumes": [*volumes, mounted]}}
