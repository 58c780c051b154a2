"""Messages of ext_proc, as Gateway API Inference Extension has them exchanged.

https://github.com/kubernetes-sigs/gateway-api-inference-extension/tree/main/docs/proposals/004-endpoint-picker-protocol
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HttpHeaders,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)
from envoy.type.v3.http_status_pb2 import HttpStatus
from google.protobuf.struct_pb2 import Struct, Value

from starling_router.upstream import PRIVATE, RawHeaders

MOST_CHUNK_BYTES = 62_000
"""Bytes of a body in one message: Envoy takes no message of more than 64 KiB."""
DESTINATION = "x-gateway-destination-endpoint"
SERVED = f"{DESTINATION}-served"
SUBSET = f"{DESTINATION}-subset"
ENDPOINTS, SUBSET_HINT = "envoy.lb", "envoy.lb.subset_hint"
"""Namespaces of metadata: of endpoints that were picked or served, and of those that may be picked."""
_OURS, _PRIVATE = (DESTINATION, SERVED), PRIVATE.decode()
_FULL_DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED


def wrong_modes(message: ProcessingRequest) -> str | None:
    """Says what of a gateway's processing mode is none that can be answered; None: nothing is, or the gateway does not tell it."""
    if not message.HasField("protocol_config"):
        return None
    given = message.protocol_config
    if given.request_body_mode != _FULL_DUPLEX:
        return f"request_body_mode has to be FULL_DUPLEX_STREAMED, not {ProcessingMode.BodySendMode.Name(given.request_body_mode)}"
    if given.response_body_mode not in (_FULL_DUPLEX, ProcessingMode.NONE):
        mode = ProcessingMode.BodySendMode.Name(given.response_body_mode)
        return f"response_body_mode has to be FULL_DUPLEX_STREAMED or NONE, not {mode}"
    return None


def raw_headers(message: HttpHeaders) -> RawHeaders:
    """Returns headers with those of HTTP/2's own (`:path`)."""
    return [(each.key.lower().encode(), each.raw_value or each.value.encode()) for each in message.headers.headers]


def subset_of(message: ProcessingRequest) -> frozenset[str] | None:
    """Returns the endpoints that a gateway lets be picked; None: all."""
    found = _metadata(message, SUBSET_HINT, SUBSET)
    if found is None:
        return None
    listed = [each.string_value for each in found.list_value.values] or found.string_value.split(",")
    return frozenset(endpoint.strip() for endpoint in listed if endpoint.strip())


def served_by(message: ProcessingRequest, headers: RawHeaders) -> str | None:
    """Returns the endpoint whose answer it is, which may be none that was picked; None: the gateway does not say."""
    found = _metadata(message, ENDPOINTS, SERVED)
    if found is not None:
        return str(found.string_value)
    return next((value.decode("latin-1") for name, value in headers if name == SERVED.encode()), None)


def _metadata(message: ProcessingRequest, namespace: str, key: str) -> Value | None:
    fields = message.metadata_context.filter_metadata
    return fields[namespace].fields[key] if namespace in fields and key in fields[namespace].fields else None


def routed(headers: RawHeaders, endpoints: Sequence[str], more: Mapping[bytes, bytes]) -> ProcessingResponse:
    """Sends a request to the first of the endpoints that serves it, with `more` headers.

    Those that are no client's to set are taken out.
    """
    value = ",".join(endpoints)
    lb = Struct(fields={DESTINATION: Value(string_value=value)})
    return ProcessingResponse(
        request_headers=HeadersResponse(response=_common({DESTINATION: value, **_text(more.items())}, headers)),
        dynamic_metadata=Struct(fields={ENDPOINTS: Value(struct_value=lb)}),
    )


def answered(headers: RawHeaders, more: RawHeaders) -> ProcessingResponse:
    """Gives an answer's headers and `more` to the client, without those that are for routers alone."""
    return ProcessingResponse(response_headers=HeadersResponse(response=_common(_text(more), headers)))


def _common(more: Mapping[str, str], headers: RawHeaders) -> CommonResponse:
    names = {name.decode("latin-1") for name, _ in headers}
    removed = sorted(name for name in names if name not in more and (name.startswith(_PRIVATE) or name in _OURS))
    return CommonResponse(header_mutation=HeaderMutation(set_headers=_options(more), remove_headers=removed))


def request_body(body: bytes, *, has_trailers: bool) -> Iterator[ProcessingResponse]:
    """Gives a body back. Its last chunk says that it is the last, unless trailers do."""
    for response in _streamed(body, not has_trailers):
        yield ProcessingResponse(request_body=response)
    if has_trailers:
        yield ProcessingResponse(request_trailers=TrailersResponse())


def response_piece(message: ProcessingRequest) -> Iterator[ProcessingResponse]:
    """Gives a piece of an answer, or its trailers, back as it came."""
    if message.HasField("response_trailers"):
        yield ProcessingResponse(response_trailers=TrailersResponse())
        return
    for response in _streamed(message.response_body.body, message.response_body.end_of_stream):
        yield ProcessingResponse(response_body=response)


def _streamed(body: bytes, is_end: bool) -> Iterator[BodyResponse]:
    for piece, is_last in chunks(body):
        streamed = StreamedBodyResponse(body=piece, end_of_stream=is_end and is_last)
        yield BodyResponse(response=CommonResponse(body_mutation=BodyMutation(streamed_response=streamed)))


def chunks(body: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yields a body in chunks that a message may have, with whether each is the last: one that is empty for an empty body."""
    for start in range(0, max(1, len(body)), MOST_CHUNK_BYTES):
        yield body[start : start + MOST_CHUNK_BYTES], start + MOST_CHUNK_BYTES >= len(body)


def refused(status: int, headers: RawHeaders, body: bytes) -> ProcessingResponse:
    """Answers in place of an endpoint."""
    kept = _text(each for each in headers if each[0] != b"content-length")
    answer = ImmediateResponse(status=HttpStatus(code=status), headers=HeaderMutation(set_headers=_options(kept)), body=body)
    return ProcessingResponse(immediate_response=answer)


def _text(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}


def _options(headers: Mapping[str, str]) -> list[HeaderValueOption]:
    overwrite = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    return [
        HeaderValueOption(header=HeaderValue(key=name, raw_value=value.encode("latin-1")), append_action=overwrite)
        for name, value in headers.items()
    ]
