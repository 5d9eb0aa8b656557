"""The gateway's HTTP application. Bodies pass through unmodified but for the tags added under `custom_params`."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import httpx
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException

from adaflash.keys import Keys
from adaflash.registry import Registry
from adaflash.release import Release
from serving.gateway import admin
from serving.gateway.body import read_body
from serving.gateway.config import GatewayConfig
from serving.gateway.controller import Controller
from serving.gateway.errors import ApiError, reshape
from serving.gateway.workers import Workers

REQUESTS = Counter("adaflash_gateway_requests_total", "Requests by route and status.", ["route", "status"])
SECONDS = Histogram(
    "adaflash_gateway_request_seconds",
    "Whole request.",
    ["route"],
    buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
IN_FLIGHT = Gauge("adaflash_gateway_in_flight_requests", "Requests being answered.")

# Only routes whose requests carry our tags into the engine: elsewhere the opt-out from logging could not be honoured.
ROUTES = ("chat/completions", "completions", "models")
DOMAIN_HEADER = "x-adaflash-domain"
STORE_HEADER = "x-adaflash-store"
VERSIONS_HEADER = "x-adaflash-versions"  # asked for with "true", answered with spans such as v3:0-17,v4:17-40
_DOMAIN = re.compile(r"[a-z0-9_-]{1,32}")


def build(config: GatewayConfig, registry: Registry, release: Release) -> FastAPI:
    """The application; `registry` supplies the workers. The release controller runs as long as it."""
    controller = Controller(release, registry, config.release)
    workers = Workers(registry, controller.trial)
    timeout = httpx.Timeout(config.first_byte_seconds, connect=config.connect_seconds)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as app.state.http:
            follower = asyncio.create_task(workers.follow())
            stop = threading.Event()
            thread = controller.start(stop)
            yield
            follower.cancel()
            stop.set()
            await asyncio.to_thread(thread.join, 5)

    app = FastAPI(title="AdaFlash gateway", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(admin.router(config, release, registry))

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        return ApiError(
            error.status_code, "not_found" if error.status_code == 404 else "http_error", str(error.detail)
        ).response()

    @app.exception_handler(RequestValidationError)
    async def bad_request(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return ApiError(422, "invalid_request", f"{where}: {first['msg']}").response()

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/readyz")
    async def readyz() -> dict[str, str]:
        if workers.choose(set()) is None:
            raise ApiError(503, "no_worker", "no worker is ready", retry_after=2)
        return {"status": "ready"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)

    @app.api_route("/v1/{path:path}", methods=["GET", "POST"])
    async def forward(path: str, request: Request) -> Response:
        started, route, status = time.monotonic(), "other", 500
        try:
            with IN_FLIGHT.track_inprogress():
                tenant = authenticate(config, request)
                if path not in ROUTES:
                    raise ApiError(404, "not_found", f"only {', '.join('/v1/' + r for r in ROUTES)} are served")
                route = path
                body = await read_body(config, request)
                if request.method == "POST":
                    body = tag(body, tenant, request)
                response = await unless_gone(request, proxy(app.state.http, workers, request, path, body))
            status = response.status_code
            return response
        except ApiError as error:
            status = error.status
            raise
        finally:
            REQUESTS.labels(route, str(status)).inc()
            SECONDS.labels(route).observe(time.monotonic() - started)

    return app


def authenticate(config: GatewayConfig, request: Request) -> str:
    """The tenant: a hash of the API key, empty when the gateway is open. Raises 401."""
    if not config.api_keys:
        return ""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    known = [k for k in config.api_keys if hmac.compare_digest(k.encode(), given.strip().encode())]
    if scheme.lower() != "bearer" or not known:
        raise ApiError(401, "invalid_api_key", "missing or unknown API key; send it as 'Authorization: Bearer <key>'")
    return hashlib.sha256(known[0].encode()).hexdigest()[:12]


def tag(body: bytes, tenant: str, request: Request) -> bytes:
    """Adds domain, tenant and the opt-out under `custom_params.adaflash`; the rest of the body stays as it is."""
    try:
        fields = json.loads(body)
    except ValueError:
        raise ApiError(400, "invalid_json", "the body is not valid JSON") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "invalid_json", "the body must be a JSON object")
    domain = request.headers.get(DOMAIN_HEADER, "other").lower()
    tags: dict[str, Any] = {"domain": domain if _DOMAIN.fullmatch(domain) else "other", "tenant": tenant}
    if fields.get("store") is False or request.headers.get(STORE_HEADER, "").lower() == "false":
        tags["store"] = False
    given = fields.get("custom_params")
    fields["custom_params"] = {**(given if isinstance(given, dict) else {}), "adaflash": tags}
    return json.dumps(fields).encode()


async def unless_gone(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """The answer, or 499 as soon as the client has hung up: the worker then stops generating for nobody."""
    work = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_hang_up(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        return Response(status_code=499)
    finally:
        gone.cancel()
        if not work.done():
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


async def proxy(http: httpx.AsyncClient, workers: Workers, request: Request, path: str, body: bytes) -> Response:
    """Sends the request to a worker, to another one if it fails before the first byte, and streams the answer back."""
    tried: set[str] = set()
    while (url := workers.choose(tried)) is not None:
        tried.add(url)
        scope = contextlib.AsyncExitStack()
        scope.enter_context(workers.busy(url))
        try:
            call = http.build_request(request.method, f"{url}/v1/{path}", content=body, headers=_headers(request))
            upstream = await http.send(call, stream=True)
            scope.push_async_callback(upstream.aclose)
        except httpx.ReadTimeout:
            await scope.aclose()
            raise ApiError(504, "worker_timeout", "the worker did not answer in time") from None
        except httpx.TransportError:
            await scope.aclose()
            continue
        except BaseException:
            await scope.aclose()
            raise
        return await _answer(upstream, scope, request.headers.get(VERSIONS_HEADER, "").lower() == "true")
    raise ApiError(503, "no_worker", "no worker could take the request", retry_after=2)


def _headers(request: Request) -> dict[str, str]:
    """What a worker needs to see; the client's key stays here."""
    kept = ("content-type", "accept", "x-smg-routing-key")
    return {k: v for k, v in request.headers.items() if k in kept}


async def _answer(upstream: httpx.Response, scope: contextlib.AsyncExitStack, versions: bool) -> Response:
    content_type = upstream.headers.get("content-type", "application/json")
    if content_type.startswith("text/event-stream") and upstream.status_code == 200:
        headers = {"X-Accel-Buffering": "no", "Cache-Control": "no-cache"}
        return StreamingResponse(_events(upstream, scope), 200, headers, content_type)
    async with scope:
        try:
            body = await upstream.aread()
        except httpx.TransportError:
            raise ApiError(502, "worker_lost", "the worker was lost while it answered") from None
    if upstream.status_code >= 400:
        body, content_type = reshape(upstream.status_code, body), "application/json"
    headers = {VERSIONS_HEADER: spans} if versions and (spans := version_spans(body)) else {}
    return Response(body, upstream.status_code, headers, content_type)


def version_spans(body: bytes) -> str:
    """The drafter versions behind an answer's tokens, from SGLang's own metadata; empty if it has none.

    Drafters do not change what is answered; this is for whoever wants to know what a request lived through.
    """
    try:
        metadata = json.loads(body)["metadata"]
        spans = metadata.get("weight_versions") or [{"version": metadata["weight_version"]}]
        return ",".join(f"{s['version']}:{s['start']}-{s['end']}" if "start" in s else s["version"] for s in spans)
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


async def _events(upstream: httpx.Response, scope: contextlib.AsyncExitStack) -> AsyncIterator[bytes]:
    """The worker's event stream; a worker lost in the middle ends it with an error event and no `[DONE]`."""
    async with scope:
        try:
            async for chunk in upstream.aiter_raw():
                yield chunk
        except httpx.TransportError:
            lost = ApiError(502, "worker_lost", "the worker was lost while it answered")
            yield b"data: " + json.dumps(lost.body()).encode() + b"\n\n"


def run(config: GatewayConfig) -> None:
    """Serves until SIGTERM; running requests are finished first."""
    import uvicorn

    from adaflash.connect import require
    from serving.ports import require_free

    require_free(config.host, config.port, "--port")
    redis, keys = require(config.redis_url), Keys(config.name)
    registry, release = Registry(redis, keys), Release(redis, keys, f"gateway-{socket.gethostname()}-{config.port}")
    uvicorn.run(
        build(config, registry, release), host=config.host, port=config.port, log_level="warning", access_log=False
    )
