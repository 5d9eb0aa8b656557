"""Three real workers on the tiny target behind two gateways, with traffic that knows the right answers."""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import torch

from adaflash.checkpoint import load_drafter
from adaflash.fleet import State
from adaflash.keys import Keys
from adaflash.registry import Registry, WorkerEntry
from adaflash.release import Release, read_events
from adaflash.rollouts import FIELD, Rollout, unpack
from adaflash.store import VersionStore
from adaflash.versions import label, target_fingerprint
from serving.ports import free_port
from tests.conftest import RedisServer
from tests.e2e.conftest import walk_prompts
from tests.e2e.servers import Process, Worker

NAME = "trio"
KEYS = Keys(NAME)
TOKENS = 40
POLICY = (
    *("release.skip_seconds=1", "release.min_steps=200", "release.canary_traffic=0.1", "release.change_seconds=60"),
    # A verdict waits for a standard error of half of this: a fifth of the requests of two processors are few.
    "release.tau_loss=0.15",
    # Three workers on two processors: how long a step takes says nothing here.
    *("release.speed_loss=0.9", "release.failures=99"),
)


class Trio:
    """`c` has a version store of its own, so that a version can be torn there."""

    def __init__(self, home: Path, target: str, drafters: Path, redis: RedisServer) -> None:
        self.home, self.target, self.drafters, self.redis = home, target, drafters, redis
        self.client = redis.client()
        self.store, self.other = VersionStore(home / "store"), VersionStore(home / "other")
        self.fingerprint = target_fingerprint(target)
        self.release = Release(self.client, KEYS, "test")
        self.workers = {name: self.start_worker(name) for name in ("a", "b", "c")}
        self.gateways = [self.start_gateway(), self.start_gateway()]

    def wait_ready(self) -> None:
        for w in self.workers.values():
            w.wait()
        for g in self.gateways:
            g.wait_ready(f"{g.url}/readyz")

    def start_worker(self, name: str) -> Worker:
        store = self.other if name == "c" else self.store
        more = ("--drafter", str(self.drafters / "weak"), "--set", f"worker_id={name}", "--set", "swap_seconds=20")
        return Worker(self.home / f"{name}.log", self.target, NAME, self.redis.url, store.root, *more)

    def start_gateway(self) -> Process:
        port = free_port()
        sets = [x for p in POLICY for x in ("--set", p)]
        arguments = ("--name", NAME, "--port", str(port), "--redis-url", self.redis.url, *sets)
        process = Process("gateway", self.home / f"gateway-{port}.log", *arguments)
        process.url = f"http://127.0.0.1:{port}"
        return process

    def publish(self, drafter: str, torn: bool = False) -> int:
        """A new version from a tiny drafter, in both stores; `torn`: in c's a part of it is lacking."""
        loaded = load_drafter(self.drafters / drafter)
        number = self.store.publish(loaded, torch.float32, target=self.fingerprint, parent=None).number
        shutil.copytree(self.store.path(number), self.other.path(number))
        if torn:
            weights = self.other.path(number) / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-100])
        return number

    def propose(self, drafter: str, torn: bool = False) -> int:
        number = self.publish(drafter, torn)
        self.release.propose(number, self.release.trainer_lease.hold(300), "test")
        return number

    def activate(self, drafter: str) -> int:
        """Promotes a new version and waits until the fleet runs it."""
        number = self.publish(drafter)
        self.release.ask("promote", number, "test")
        self.wait(lambda s: s.active == number and s.phase == "idle")
        self.converged(number)
        return number

    def state(self) -> State:
        return self.release.state()

    def entries(self) -> dict[str, WorkerEntry]:
        return {e.id: e for e in Registry(self.client, KEYS).live()}

    def events(self) -> list[dict]:
        return read_events(self.client, KEYS)

    def wait(self, condition: Callable[[State], bool], seconds: float = 180) -> State:
        deadline = time.monotonic() + seconds
        while not condition(s := self.state()):
            assert time.monotonic() < deadline, (s, self.entries(), self.events()[-5:])
            time.sleep(0.1)
        return s

    def converged(self, number: int, seconds: float = 120, count: int = 3) -> None:
        """Every one of the workers is ready and runs `number`."""
        deadline = time.monotonic() + seconds
        want = [("ready", label(number))] * count
        while [(e.state, e.version) for e in self.entries().values()] != want:
            assert time.monotonic() < deadline, (self.state(), self.entries())
            time.sleep(0.1)

    def kill_worker(self, name: str) -> None:
        """Agent and engine at once, without a word."""
        root = psutil.Process(self.workers[name].popen.pid)
        family = [*root.children(recursive=True), root]
        for p in family:
            p.kill()
        psutil.wait_procs(family, 20)
        self.workers[name].popen.wait(20)

    def rollouts(self) -> list[Rollout]:
        return [unpack(fields[FIELD]) for _, fields in self.client.xrange(KEYS.rollouts)]

    def tau(self, since: float, until: float) -> float:
        """Tokens per verify step of the whole fleet's requests that ended in between."""
        found = [r for r in self.rollouts() if since <= r.finished_at < until]
        return sum(sum(r.accepted) for r in found) / max(sum(len(r.accepted) for r in found), 1)

    def stop(self) -> None:
        for p in (*self.gateways, *self.workers.values()):
            p.stop()


class Traffic:
    """Clients that ask without pause through the gateways; each answer has to be the one that was given at first."""

    def __init__(self, trio: Trio, clients: int = 4) -> None:
        self.trio, self.failures, self.answered = trio, [], 0
        self.prompts = walk_prompts(48, seed=51)
        self.right: dict[int, str] = {}
        self.stopped = threading.Event()
        self.threads = [threading.Thread(target=self._run, args=(k, clients), daemon=True) for k in range(clients)]

    def ask(self, i: int) -> str:
        """One answer; a gateway that is gone is not the fleet's fault, so the next one is asked."""
        body = {"model": NAME, "prompt": self.prompts[i], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        for gateway in self.trio.gateways:
            if gateway.popen.poll() is None:
                try:
                    r = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=120)
                except httpx.TransportError:
                    continue
                assert r.status_code == 200, r.text
                return r.json()["choices"][0]["text"]
        raise AssertionError("no gateway is left")

    def __enter__(self) -> Traffic:
        self.right = {i: self.ask(i) for i in range(len(self.prompts))}
        for t in self.threads:
            t.start()
        return self

    def _run(self, k: int, clients: int) -> None:
        for n in itertools.count():
            if self.stopped.is_set():
                return
            i = (n * clients + k) % len(self.prompts)
            try:
                text = self.ask(i)
                if text != self.right[i]:
                    self.failures.append(f"prompt {i}: {text!r}")
                self.answered += 1
            except (AssertionError, httpx.HTTPError) as error:
                self.failures.append(repr(error)[:300])

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        for t in self.threads:
            t.join(150)


class Truth(threading.Thread):
    """Compares what the registry says with what the engines say, all the time."""

    def __init__(self, trio: Trio) -> None:
        super().__init__(daemon=True)
        self.trio, self.lies, self.checked, self.stopped = trio, [], 0, threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(0.2):
            before = self.trio.entries()
            found = {}
            for name, entry in before.items():
                try:
                    body = self.trio.workers[name].http.get("/model_info", timeout=20).json()
                    found[name] = body["weight_version"]
                except (httpx.HTTPError, ValueError, KeyError):
                    continue
                after = self.trio.entries().get(name)
                settled = after is not None and entry.state == after.state == "ready" and entry.version == after.version
                if settled:
                    self.checked += 1
                    if entry.version != found[name]:
                        self.lies.append((name, entry.version, found[name]))
