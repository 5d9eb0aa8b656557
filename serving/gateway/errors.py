"""OpenAI-shaped errors: the one place where the gateway builds or reshapes them."""

from __future__ import annotations

import json
from typing import Any

from fastapi.responses import JSONResponse


class ApiError(Exception):
    """Ends a request with `status` and an OpenAI error object."""

    def __init__(self, status: int, code: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.retry_after = status, code, message, retry_after

    def body(self) -> dict[str, Any]:
        """`{"error": {...}}` as the OpenAI clients parse it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}

    def response(self) -> JSONResponse:
        """The HTTP answer."""
        headers = {"Retry-After": str(self.retry_after)} if self.retry_after else None
        return JSONResponse(self.body(), self.status, headers)


def reshape(status: int, body: bytes) -> bytes:
    """A worker's error body in OpenAI shape; one that already is stays as it is."""
    try:
        found = json.loads(body)
    except ValueError:
        return json.dumps(ApiError(status, "worker_error", f"the worker answered {status}").body()).encode()
    if isinstance(found, dict) and "error" in found:
        return body
    message = found.get("message") if isinstance(found, dict) else None
    code = found.get("type") if isinstance(found, dict) else None
    return json.dumps(ApiError(status, str(code or "worker_error"), str(message or found)).body()).encode()
