"""The endpoint picker of a gateway (EPP): the same choice of a backend, for an Envoy that carries requests and answers itself.

 gateway ─▶ server.py ─▶ stream.py ─▶ the middleware of every HTTP server ─▶ pick_app.py ─▶ the router's hold and picker
            gRPC         messages     keys, limits of bodies                                which endpoint, until the answer's end

A request is an ASGI application's, as in the router: what refuses it there refuses it here, in the same words.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EppSettings:
    """Settings of an endpoint picker.

    gateways   port that gateways ask
    health     port for probes of gRPC's health
    secure     the gateways' port has TLS, which most of them expect, with a certificate of its own that they do not verify
    fallbacks  endpoints that are named behind the one that was picked, for retries; some gateways read one endpoint alone
    """

    gateways: int
    health: int
    secure: bool = True
    fallbacks: int = 0
