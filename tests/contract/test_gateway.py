"""The gateway's edges: keys, limits, error shapes and lost workers. The workers here are faults, so they are stubs."""

from __future__ import annotations

import json
import socket
import threading
import time

import httpx
import pytest
import uvicorn

from adaflash.connect import connect
from adaflash.keys import Keys
from adaflash.registry import Registry
from adaflash.release import Release
from serving.gateway.app import build
from serving.gateway.config import GatewayConfig
from serving.gateway.workers import Workers
from serving.ports import free_port
from tests.contract.test_release_and_registry import entry

KEY = {"Authorization": "Bearer k1"}


class Stub:
    """A worker that reads one request per connection and answers with fixed bytes, then hangs up."""

    def __init__(self, answer: bytes) -> None:
        self.answer, self.requests = answer, []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection:
                data = b""
                while b"\r\n\r\n" not in data:
                    data += connection.recv(65536)
                head, _, body = data.partition(b"\r\n\r\n")
                length = next(
                    (int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length")), 0
                )
                while len(body) < length:
                    body += connection.recv(65536)
                self.requests.append(body)
                connection.sendall(self.answer)


def answer(status: str, body: bytes, kind: str = "application/json") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@pytest.fixture
def gateway(redis_server):
    """A real gateway; `worker(*stubs)` registers workers and waits until they are known."""
    config = GatewayConfig(name="m", port=free_port(), api_keys=["k1", "k2"], max_body_bytes=1 << 16, connect_seconds=1)
    redis, keys = connect(redis_server.url), Keys("m")
    registry = Registry(redis, keys)
    app = build(config, registry, Release(redis, keys, "gateway"))
    server = uvicorn.Server(uvicorn.Config(app, port=config.port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    client = httpx.Client(base_url=f"http://127.0.0.1:{config.port}", headers=KEY, timeout=20)
    while not server.started:
        time.sleep(0.01)

    def worker(*stubs):
        for i, s in enumerate(stubs):
            registry.announce(entry(f"w{i}", url=s if isinstance(s, str) else s.url))
        deadline = time.monotonic() + 10
        while f"workers {len(stubs)}.0" not in client.get("/metrics").text:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    client.worker = worker
    yield client
    server.should_exit = True
    thread.join(10)


def chat(client, **more):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | more.pop("body", {})
    return client.post("/v1/chat/completions", json=body, **more)


def test_without_a_key_or_with_a_wrong_one_it_is_401_in_openai_shape(gateway):
    for headers in ({"Authorization": ""}, {"Authorization": "Bearer nope"}, {"Authorization": "k1"}):
        r = chat(gateway, headers=headers)
        assert (r.status_code, r.json()["error"]["code"]) == (401, "invalid_api_key")


def test_health_and_metrics_need_no_key(gateway):
    bare = httpx.Client(base_url=gateway.base_url)
    assert bare.get("/healthz").status_code == 200
    assert bare.get("/metrics").status_code == 200


def test_without_a_worker_it_is_503_with_retry_after(gateway):
    r = chat(gateway)
    assert (r.status_code, r.json()["error"]["code"]) == (503, "no_worker")
    assert int(r.headers["retry-after"]) > 0
    assert gateway.get("/readyz").status_code == 503


def test_tags_are_added_and_the_rest_of_the_body_is_untouched(gateway):
    stub = Stub(answer("200 OK", b'{"choices": []}'))
    gateway.worker(stub)
    body = {"temperature": 0.3, "seed": 5, "custom_params": {"mine": 1}, "tools": [{"x": None}], "store": False}
    assert chat(gateway, body=body, headers={"x-adaflash-domain": "Math"}).json() == {"choices": []}
    got = json.loads(stub.requests[0])
    tags = got["custom_params"].pop("adaflash")
    assert {k: got[k] for k in body} == body
    assert tags["domain"] == "math" and tags["store"] is False
    assert len(tags["tenant"]) == 12 and "k1" not in tags["tenant"]


def test_a_client_cannot_forge_the_tags(gateway):
    stub = Stub(answer("200 OK", b"{}"))
    gateway.worker(stub)
    chat(gateway, body={"custom_params": {"adaflash": {"tenant": "other"}}}, headers={"x-adaflash-domain": "a b/c"})
    tags = json.loads(stub.requests[0])["custom_params"]["adaflash"]
    assert tags["tenant"] != "other" and tags["domain"] == "other"


def test_a_dead_worker_is_passed_over_for_a_living_one(gateway):
    living = Stub(answer("200 OK", b'{"ok": 1}'))
    gateway.worker(f"http://127.0.0.1:{free_port()}", living)
    for _ in range(4):
        assert chat(gateway).json() == {"ok": 1}


def test_only_dead_workers_are_503(gateway):
    gateway.worker(f"http://127.0.0.1:{free_port()}")
    assert chat(gateway).status_code == 503


def test_a_worker_lost_in_the_middle_of_a_stream_ends_it_with_an_error_and_no_done(gateway):
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    gateway.worker(Stub(head + b"b\r\ndata: one\n\n\r\n"))
    r = chat(gateway, body={"stream": True})
    first, error, end = r.text.split("\n\n")
    assert (r.status_code, first, end) == (200, "data: one", "")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "worker_lost"
    assert r.headers["x-accel-buffering"] == "no"


def test_a_workers_error_is_reshaped_to_openais(gateway):
    gateway.worker(
        Stub(answer("400 Bad Request", b'{"object":"error","message":"too long","type":"BadRequest","code":400}'))
    )
    r = chat(gateway)
    assert (r.status_code, r.json()["error"]["message"], r.json()["error"]["code"]) == (400, "too long", "BadRequest")


def test_long_bodies_are_413_with_and_without_a_length(gateway):
    assert chat(gateway, body={"x": "a" * (1 << 17)}).status_code == 413
    chunks = (b"a" * 4096 for _ in range(64))
    assert gateway.post("/v1/chat/completions", content=chunks).status_code == 413


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"'])
def test_bodies_that_are_no_json_object_are_400(gateway, body):
    r = gateway.post("/v1/chat/completions", content=body)
    assert (r.status_code, r.json()["error"]["code"]) == (400, "invalid_json")


def test_unknown_paths_are_404_in_openai_shape(gateway):
    r = gateway.get("/nowhere")
    assert (r.status_code, r.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("path", ["responses", "messages", "%2e%2e/server_info", "models/%2e%2e/%2e%2e/server_info"])
def test_routes_that_could_not_honour_the_opt_out_or_leave_v1_are_404_and_reach_no_worker(gateway, path):
    stub = Stub(answer("200 OK", b'{"admin_api_key": "secret"}'))
    gateway.worker(stub)
    for r in (gateway.get(f"/v1/{path}"), gateway.post(f"/v1/{path}", json={"store": False})):
        assert (r.status_code, r.json()["error"]["code"]) == (404, "not_found")
    assert stub.requests == []


def test_odd_paths_do_not_make_metric_series(gateway):
    for i in range(20):
        gateway.get(f"/v1/junk{i}")
    lines = [x for x in gateway.get("/metrics").text.splitlines() if x.startswith("adaflash_gateway_requests_total{")]
    assert not any("junk" in x for x in lines)


def test_redis_down_keeps_the_known_workers(gateway, redis_server):
    gateway.worker(Stub(answer("200 OK", b'{"ok": 1}')))
    redis_server.kill()
    time.sleep(2.5)
    assert chat(gateway).json() == {"ok": 1}
    for file in redis_server.home.rglob("*.aof*"):
        file.unlink()
    redis_server.start()  # empty, and no worker has announced itself again yet
    time.sleep(2.5)
    assert chat(gateway).json() == {"ok": 1}


def test_a_client_that_hangs_up_ends_its_request_at_the_worker(gateway):
    """The stub never answers; the connection to it has to close when the client goes away."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        gateway.worker(f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(httpx.ReadTimeout):
            chat(gateway, timeout=0.5)
        connection, _ = server.accept()
        connection.settimeout(10)
        while connection.recv(65536):
            continue  # an empty read: closed by the gateway


@pytest.mark.parametrize(
    ("metadata", "header"),
    [
        ({"weight_version": "v4"}, "v4"),
        ({"weight_version": "v4", "weight_versions": [{"version": "v3", "start": 0, "end": 17}]}, "v3:0-17"),
        (
            {"weight_versions": [{"version": "v3", "start": 0, "end": 7}, {"version": "v4", "start": 7, "end": 9}]},
            "v3:0-7,v4:7-9",
        ),
        (None, None),
    ],
)
def test_an_answer_names_the_versions_behind_it_if_asked_to(gateway, metadata, header):
    body = json.dumps({"choices": [], "metadata": metadata}).encode()
    gateway.worker(Stub(answer("200 OK", body)))
    asked = chat(gateway, headers=KEY | {"X-AdaFlash-Versions": "true"})
    assert (asked.headers.get("x-adaflash-versions"), asked.content) == (header, body)
    assert "x-adaflash-versions" not in chat(gateway).headers


def test_workers_on_trial_get_their_share_of_the_requests_and_no_more(redis_server):
    registry = Registry(redis_server.client(), Keys("m"))
    entries = [entry(f"w{k}", url=f"http://w{k}") for k in range(4)]
    trial = [frozenset({"w0"}), 0.1]
    workers = Workers(registry, lambda: tuple(trial))
    workers._take(entries)

    def share(tried=frozenset()):
        chosen = [workers.choose(set(tried)) for _ in range(2000)]
        return chosen.count("http://w0") / 2000

    assert share() == pytest.approx(0.1, abs=0.03)
    trial[1] = 1.0
    assert share() == pytest.approx(0.25, abs=0.04), "more than its part of the workers"
    assert share({"http://w1", "http://w2", "http://w3"}) == 1, "it is all that is left"
    trial[0] = frozenset({f"w{k}" for k in range(4)})
    assert workers.choose(set()) is not None
