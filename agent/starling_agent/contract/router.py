"""Headers by which routers and agents of one service know each other. All of them begin with `x-starling-`.

Agents have the admin token, and derive the routers' from it. Routers get only the derived one: it opens no admin endpoint.
"""

import hashlib
import hmac

ROUTER_TOKEN = "x-starling-router"
"""Has the token by which an agent believes a router, and a router an agent."""
POD = "x-starling-pod"
"""Names the pod that a request of an agent is for, so that its own token comes back to it through the routers."""
TENANT = "x-starling-tenant"
"""The tenant whose key the router has checked. It owns what its request caches and stores, in place of the key."""
PRIORITY = "x-starling-priority"
"""The tenant's priority, a higher one first, for servers that run requests by priority."""
LONE = "x-starling-lone"
"""Says that the tenant has no other request open: its prompt goes first, on servers that run requests in order of arrival."""
SHADOW = "x-starling-shadow"
"""Says that a router asks for itself what a client has asked before: no rate limit of the client's counts it."""

LAG_SECONDS = 10.0
USUAL_SECONDS = 120.0
"""Time that clients have for a new connection where none is ever closed for its age."""

PROOF_PATH = "/backend/proof"
"""`GET ?nonce=...` of an agent, open to all: it proves that it knows the token, so that a router shows it to no other service."""


def token_proof(token: bytes, nonce: bytes) -> str:
    """Returns the proof of who knows the routers' token, for a nonce that the asker has drawn. It says nothing of the token."""
    return hmac.new(token, b"proof\0" + nonce, hashlib.sha256).hexdigest()


def router_token(admin_token: bytes) -> bytes:
    """Returns the routers' token, 64 hexadecimal digits."""
    return hmac.new(admin_token, b"router", hashlib.sha256).hexdigest().encode()


def seconds_to_leave(connection_seconds: float) -> float:
    """Returns how long connections to an agent may last once clients are led to routers. They end by themselves until then."""
    return (connection_seconds or USUAL_SECONDS) + LAG_SECONDS
