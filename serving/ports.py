"""Checks a port before anything slow starts on it."""

from __future__ import annotations

import socket

from adaflash.errors import UserError


class PortInUse(UserError):
    """Something else listens there; the message says which option to change."""


def require_free(host: str, port: int, option: str) -> None:
    """Raises PortInUse if `host:port` cannot be bound."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as error:
            raise PortInUse(
                f"port {port} on {host} cannot be used ({error.strerror}); choose another with {option}"
            ) from None


def free_port() -> int:
    """A port that is free now, for processes that are configured before they start."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
