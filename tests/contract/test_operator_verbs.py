"""Operators' verbs through the CLI and the admin API of a real gateway, on a real Redis."""

from __future__ import annotations

import json
import threading
import time

import httpx
import pytest
import uvicorn
from typer.testing import CliRunner

from adaflash.cli import app
from adaflash.connect import connect
from adaflash.keys import Keys
from adaflash.registry import Registry
from adaflash.release import Release, read_events
from serving.gateway import controller as loop
from serving.gateway.app import build
from serving.gateway.config import GatewayConfig
from serving.ports import free_port
from tests.contract.test_release_and_registry import entry
from tests.release import activate

KEYS = Keys("m")
ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture
def gateway(redis_server, monkeypatch):
    monkeypatch.setattr(loop, "TTL_SECONDS", 0.0)
    monkeypatch.setattr(loop, "TICK_SECONDS", 0.1)
    config = GatewayConfig(name="m", port=free_port(), api_keys=["user"], admin_key="admin")
    redis = connect(redis_server.url)
    activate(redis, KEYS, 1)
    activate(redis, KEYS, 2)
    Registry(redis, KEYS).announce(entry("w", version="v2", started="s"))
    server = uvicorn.Server(
        uvicorn.Config(
            build(config, Registry(redis, KEYS), Release(redis, KEYS, "g")), port=config.port, log_level="error"
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    client = httpx.Client(base_url=f"http://127.0.0.1:{config.port}", headers=ADMIN, timeout=20)
    client.redis_url = redis_server.url
    client.release = Release(redis, KEYS, "test")
    yield client
    server.should_exit = True
    thread.join(10)


def run(gateway, *arguments, code=0):
    done = CliRunner().invoke(app, [*arguments, "--name", "m", "--redis-url", gateway.redis_url])
    assert done.exit_code == code, done.output
    return done


def test_each_verb_of_the_cli_is_done_and_leaves_who_and_why(gateway):
    assert "pin: done" in run(gateway, "pin", "--why", "release week").output
    assert gateway.release.state().pinned == 2
    run(gateway, "unpin")
    run(gateway, "pause")
    run(gateway, "promote", "v3", "--why", "looks good")
    assert gateway.release.state().forced == 3
    run(gateway, "reject", "3")
    run(gateway, "resume")
    run(gateway, "rollback")
    events = [e for e in read_events(gateway.release.redis, KEYS) if e.get("command")]
    assert [e["what"] for e in events] == ["pin", "unpin", "pause", "promote", "reject", "resume", "rollback"]
    assert all("@" in e["who"] for e in events)
    assert (events[0]["why"], events[3]["why"], events[3]["to"]) == ("release week", "looks good", 3)


def test_a_verb_that_makes_no_sense_fails_with_the_reason(gateway):
    done = run(gateway, "unpin", code=1)
    assert str(done.exception) == "unpin was ignored: nothing is pinned"
    assert "not a version label" in str(run(gateway, "promote", "newest", code=1).exception)


def test_status_shows_what_moves_and_who_decides(gateway):
    run(gateway, "pause")
    run(gateway, "pin", "v3")
    text = run(gateway, "status").output
    assert "active v2, previous v1, 1 live workers" in text
    assert "pinned v3, paused, controller g" in text


def test_without_a_controller_a_verb_says_that_it_only_waits(redis_server, monkeypatch):
    monkeypatch.setattr("adaflash.cli_release.ANSWER_SECONDS", 0.3)
    arguments = ["pause", "--name", "m", "--redis-url", redis_server.url]
    done = CliRunner().invoke(app, arguments)
    assert "no controller has taken it up" in str(done.exception)


def test_the_admin_api_needs_its_own_key(gateway):
    for key in ("", "Bearer user", "Bearer nope", "admin"):
        for call in (("GET", "/admin/status"), ("POST", "/admin/pause"), ("GET", "/admin/events")):
            r = gateway.request(*call, headers={"Authorization": key}, json={})
            assert (r.status_code, r.json()["error"]["code"]) == (401, "invalid_api_key")
    assert not gateway.release.state().paused
    assert gateway.get("/v1/models").status_code == 401  # and is no user's key


def test_the_admin_api_does_what_the_cli_does(gateway):
    r = gateway.post("/admin/pin", json={"version": 3, "who": "ann", "why": "test"})
    assert (r.status_code, r.json()["done"]) == (200, True)
    status = gateway.get("/admin/status").json()
    assert status["release"]["pinned"] == 3
    assert [w["id"] for w in status["workers"]] == ["w"]
    r = gateway.post("/admin/promote", json={"version": 1})
    assert (r.status_code, r.json()["error"]["message"]) == (409, "another version is pinned; unpin first")
    events = [json.loads(line) for line in gateway.get("/admin/events").text.splitlines()]
    assert ("ann", "pin", "test") in [(e["who"], e["what"], e.get("why")) for e in events]


@pytest.mark.parametrize("body", [{"version": -1}, {"versoin": 3}, {"version": "x"}])
def test_a_malformed_order_is_refused_by_name(gateway, body):
    r = gateway.post("/admin/pin", json=body)
    assert r.status_code == 422
    assert next(iter(body)) in r.json()["error"]["message"]


def test_an_unknown_verb_is_refused(gateway):
    assert gateway.post("/admin/explode", json={}).status_code == 422


def test_events_can_be_followed(gateway):
    with gateway.stream("GET", "/admin/events", params={"follow": True}) as r:
        lines = r.iter_lines()
        assert json.loads(next(lines))["what"] == "promoted"
        gateway.release.ask("pause")
        seen = (json.loads(line)["what"] for line in lines if line)
        assert next(w for w in seen if w == "pause")
