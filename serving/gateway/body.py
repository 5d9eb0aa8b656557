"""Reads request bodies with a limit."""

from __future__ import annotations

from fastapi import Request

from serving.gateway.config import GatewayConfig
from serving.gateway.errors import ApiError


async def read_body(config: GatewayConfig, request: Request) -> bytes:
    """The whole body, refused with 413 as soon as it is known to be too long."""
    too_long = ApiError(413, "request_too_large", f"the body is longer than {config.max_body_bytes} bytes")
    if int(request.headers.get("content-length") or 0) > config.max_body_bytes:
        raise too_long
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > config.max_body_bytes:
            raise too_long
    return bytes(body)
