"""Redis connections with deadlines, so that no caller can hang on a lost server."""

from __future__ import annotations

import os
from urllib.parse import urlsplit, urlunsplit

from redis import Redis
from redis.exceptions import RedisError

from adaflash.errors import UserError

DEFAULT_URL = "redis://127.0.0.1:6379/0"


class RedisUnavailable(UserError):
    """Redis could not be reached at start-up; the message says where and what to set."""


def connect(url: str, *, timeout: float = 2.0) -> Redis:
    """A lazily connecting client; every call ends within about `timeout` seconds."""
    return Redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout, health_check_interval=15)


def require(url: str) -> Redis:
    """A client whose server answered; raises RedisUnavailable with one line for the terminal otherwise."""
    try:
        client = connect(url)
        client.ping()
    except RedisError as error:
        raise RedisUnavailable(
            f"Redis at {without_password(url)} does not answer ({error}); start it or set REDIS_URL"
        ) from None
    except ValueError as error:
        raise RedisUnavailable(f"REDIS_URL is not a Redis URL: {error}") from None
    return client


def without_password(url: str) -> str:
    """The URL fit for a log line."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{parts.hostname}:{parts.port or 6379}"))


def url_from_environment() -> str:
    """`REDIS_URL`, or the local default."""
    return os.environ.get("REDIS_URL", DEFAULT_URL)
