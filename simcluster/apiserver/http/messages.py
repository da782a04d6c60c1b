"""Bodies of requests, decoded by their content type, and JSON responses."""

import msgspec
from aiohttp import web

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import JsonValue, decode, encode
from simcluster.apiserver.http.protobuf_bodies import CONTENT_TYPE, decode_body
from simcluster.apiserver.requests.patches import APPLY_PATCH, parse_yaml

MAX_BODY_BYTES = 3 * 1024 * 1024


async def read_body(request: web.BaseRequest) -> JsonValue:
    """Read and decode the body: JSON, YAML or protobuf; None if it is empty.

    413 if it is larger than `MAX_BODY_BYTES`, 400 if it is malformed.
    """
    try:
        raw = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        text = f"Request entity too large: limit is {MAX_BODY_BYTES}"
        raise ApiError(413, "RequestEntityTooLarge", text) from error
    if not raw:
        return None
    if request.content_type in {"application/yaml", APPLY_PATCH}:
        return parse_yaml(raw)
    if request.content_type == CONTENT_TYPE:
        return decode_body(raw)
    try:
        return decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError.bad_request(f"error decoding JSON: {error}") from error


def json_response(
    body: bytes, code: int = 200, *, content_type: str = "application/json"
) -> web.Response:
    """Return a response with an encoded JSON body."""
    return web.Response(body=body, status=code, headers={"Content-Type": content_type})


def error_response(error: ApiError) -> web.Response:
    """Return the response that carries an error's Status."""
    response = json_response(encode(error.status()), error.code)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response
