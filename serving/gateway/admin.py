"""The admin API: release state, events and the operators' verbs, under `/admin` with a key of its own.

The same commands as the CLI's, through the same stream: each leaves an audit entry with who asked and why.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from redis.exceptions import RedisError

from adaflash.errors import one_line
from adaflash.registry import Registry
from adaflash.release import Release, read_events
from adaflash.report import Outcome, outcome, overview
from serving.gateway.body import read_body
from serving.gateway.config import GatewayConfig
from serving.gateway.errors import ApiError

ANSWER_SECONDS = 5.0
POLL_SECONDS = 0.25
FOLLOW_SECONDS = 60.0  # then the client asks for what follows its last id; an endless answer would hold up a shutdown
OperatorVerb = Literal["promote", "reject", "rollback", "pin", "unpin", "pause", "resume"]


class Order(BaseModel):
    """Body of a verb. `version`: as 12."""

    model_config = ConfigDict(extra="forbid")

    version: int | None = Field(None, ge=0)
    who: str = Field("admin-api", min_length=1, max_length=64)
    why: str = Field("", max_length=500)


def router(config: GatewayConfig, release: Release, registry: Registry) -> APIRouter:
    """The routes; every one needs the admin key."""

    def allowed(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if not config.admin_key:
            raise ApiError(404, "not_found", "the admin API is off; set the gateway's admin_key")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), config.admin_key.encode()):
            raise ApiError(401, "invalid_api_key", "the admin API needs the admin key")

    routes = APIRouter(prefix="/admin", dependencies=[Depends(allowed)])

    @routes.get("/status")
    async def status() -> dict[str, Any]:
        return await _redis(overview, release, registry)

    @routes.get("/events")
    async def events(
        after: Annotated[str, Query(pattern=r"^\d+(-\d+)?$")] = "0-0", follow: bool = False
    ) -> StreamingResponse:
        first = await _redis(read_events, release.redis, release.keys, f"({after}")
        return StreamingResponse(_lines(release, first, after, follow), media_type="application/x-ndjson")

    @routes.post("/{verb}")
    async def order(verb: OperatorVerb, request: Request) -> dict[str, Any]:
        body = await _order(config, request)  # after the key was checked, and no longer than allowed
        asking = Release(release.redis, release.keys, body.who)
        sent = await _redis(asking.ask, verb, body.version, body.why)
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            found: Outcome | None = await _redis(outcome, release, sent)
            if found is not None:
                if not found.done:
                    raise ApiError(409, "ignored", found.why)
                return {"command": sent, "done": True}
            await asyncio.sleep(POLL_SECONDS)
        return {"command": sent, "done": False, "why": "no controller has taken it up yet; it stays queued"}

    return routes


async def _order(config: GatewayConfig, request: Request) -> Order:
    try:
        return Order.model_validate_json(await read_body(config, request) or b"{}")
    except ValidationError as error:
        raise ApiError(422, "invalid_request", one_line(error)) from None


async def _redis(function: Any, *arguments: Any) -> Any:
    try:
        return await asyncio.to_thread(function, *arguments)
    except RedisError as error:
        raise ApiError(503, "redis_unavailable", f"Redis does not answer: {type(error).__name__}") from None


async def _lines(release: Release, first: list[dict[str, Any]], after: str, follow: bool) -> AsyncIterator[str]:
    """Events as JSON lines; with `follow` for a while, an empty line a second while nothing happens."""
    found, until = first, time.monotonic() + FOLLOW_SECONDS
    while True:
        for event in found:
            after = event["id"]
            yield json.dumps(event) + "\n"
        if not follow or time.monotonic() > until:
            return
        if not found:
            yield "\n"  # a client that is gone is noticed here
        await asyncio.sleep(1.0)
        try:
            found = await asyncio.to_thread(read_events, release.redis, release.keys, f"({after}")
        except RedisError:
            found = []  # asked again for everything since `after`
