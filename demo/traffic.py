"""Sends the demo's chat requests through the gateway, as any OpenAI client would, and counts what comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

from demo.prompts import Prompt


@dataclass(frozen=True)
class Answer:
    """One finished request."""

    domain: str
    text: str
    tokens: int
    seconds: float
    at: float
    error: str = ""


def ask(http: httpx.Client, model: str, prompt: Prompt, max_tokens: int) -> Answer:
    """One greedy chat request; failures become an Answer with `error`."""
    body = {"model": model, "messages": prompt.messages, "max_tokens": max_tokens, "temperature": 0}
    started = time.monotonic()
    try:
        r = http.post("/v1/chat/completions", json=body, headers={"x-adaflash-domain": prompt.domain})
        r.raise_for_status()
        found = r.json()
        text, tokens = found["choices"][0]["message"]["content"], int(found["usage"]["completion_tokens"])
    except (httpx.HTTPError, KeyError, ValueError) as error:
        return Answer(prompt.domain, "", 0, time.monotonic() - started, time.time(), f"{type(error).__name__}: {error}")
    return Answer(prompt.domain, text, tokens, time.monotonic() - started, time.time())


class Traffic:
    """`clients` threads that take prompts from one stream until stopped."""

    def __init__(self, url: str, model: str, prompts: Iterator[Prompt], clients: int, max_tokens: int) -> None:
        self.answers: list[Answer] = []
        self._http = httpx.Client(base_url=url, timeout=300)
        self._model, self._prompts, self._max_tokens = model, prompts, max_tokens
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._client, daemon=True) for _ in range(clients)]

    def start(self) -> None:
        """Starts the clients."""
        for t in self._threads:
            t.start()

    def stop(self) -> None:
        """Lets running requests finish and ends the clients."""
        self._stop.set()
        for t in self._threads:
            t.join()
        self._http.close()

    def _client(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                prompt = next(self._prompts)
            answer = ask(self._http, self._model, prompt, self._max_tokens)
            with self._lock:
                self.answers.append(answer)
            if answer.error:
                self._stop.wait(1.0)


def throughput(
    url: str, model: str, prompts: list[Prompt], clients: int, max_tokens: int
) -> tuple[float, list[Answer]]:
    """Output tokens per second of `clients` clients that share `prompts`, after one warm-up request."""
    with httpx.Client(base_url=url, timeout=300) as http, ThreadPoolExecutor(clients) as pool:
        ask(http, model, prompts[0], 4)
        started = time.monotonic()
        answers = list(pool.map(lambda p: ask(http, model, p, max_tokens), prompts))
        return sum(a.tokens for a in answers) / (time.monotonic() - started), answers
