"""The operations port that worker and trainer share: `/metrics`, `/healthz`, `/readyz`, served from a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest


def serve_ops(host: str, port: int, ready: Callable[[], bool]) -> None:
    """Starts the port; `ready` decides `/readyz`. `/healthz` answers as long as the process lives."""
    app = FastAPI(title="AdaFlash operations", docs_url=None, redoc_url=None)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)

    @app.get("/healthz")
    def healthz() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/readyz")
    def readyz(response: Response) -> dict[str, str]:
        if ready():
            return {"status": "ready"}
        response.status_code = 503
        return {"status": "not ready"}

    server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level="warning", access_log=False))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    threading.Thread(target=server.run, name="ops-port", daemon=True).start()
