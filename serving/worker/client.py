"""The agent's HTTP client for its own engine: exactly the calls a start and a swap need, each with a deadline."""

from __future__ import annotations

import base64
import json
import pickle
from typing import Any

import httpx
import numpy as np
import torch

from serving.sglang_plugin import loader

METRICS_SECONDS = 2.0


class EngineError(RuntimeError):
    """The engine refused a call or did not answer in time."""


class Engine:
    """SGLang's admin and generate endpoints; see sglang 0.5.23 `srt/entrypoints/http_server.py`."""

    def __init__(self, url: str, admin_key: str, timeout: float) -> None:
        self._http = httpx.Client(
            base_url=url, timeout=timeout, trust_env=False, headers={"Authorization": f"Bearer {admin_key}"}
        )

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        try:
            answer = self._http.post(path, json=body)
        except httpx.HTTPError as error:
            raise EngineError(f"{path}: {type(error).__name__}") from error
        if answer.status_code != 200:
            raise EngineError(f"{path}: HTTP {answer.status_code}: {answer.text[:200]}")
        try:
            return answer.json()
        except ValueError as error:
            raise EngineError(f"{path}: the answer is not JSON") from error

    def up(self) -> bool:
        """True once the HTTP server answers."""
        try:
            return self._http.get("/model_info").status_code == 200
        except httpx.HTTPError:
            return False

    def generate(self, ids: list[int], tokens: int) -> dict[str, Any]:
        """Greedy continuation of `ids`, exactly `tokens` long; not logged as a rollout."""
        answer: dict[str, Any] = self._post("/generate", {"input_ids": ids, "sampling_params": _probe(tokens)})
        return answer

    def generate_all(self, prompts: list[list[int]], tokens: int) -> None:
        """Greedy continuations of all prompts at once, each exactly `tokens` long; not logged."""
        self._post("/generate", {"input_ids": prompts, "sampling_params": _probe(tokens)})

    def set_state(self, **values: Any) -> None:
        """Changes SGLang's settings that can change while it runs."""
        answer = self._post("/set_internal_state", {"server_args": values})
        refused = [a for a in answer if not (a.get("updated") if isinstance(a, dict) else a)]
        if refused:
            raise EngineError(f"/set_internal_state: {values} refused")

    def step_records(self) -> list[dict[str, Any]]:
        """SGLang's records of decode steps since they were last cleared (SGLANG_DSPARK_ENABLE_SPS_RECORD)."""
        try:
            info = self._http.get("/server_info").json()
        except (httpx.HTTPError, ValueError) as error:
            raise EngineError(f"/server_info: {type(error).__name__}") from error
        records = (info["internal_states"][0].get("dspark_info_record") or {}).get("records")
        if records is None:
            raise EngineError("/server_info shows no step records")
        return list(records)

    def metrics(self) -> str:
        """The engine's metrics in Prometheus' text format."""
        try:
            answer = self._http.get("/metrics", timeout=METRICS_SECONDS)
        except httpx.HTTPError as error:
            raise EngineError(f"/metrics: {type(error).__name__}") from error
        if answer.status_code != 200:
            raise EngineError(f"/metrics: HTTP {answer.status_code}")
        return answer.text

    def pause(self) -> None:
        """Stops scheduling; running requests keep their state."""
        self._post("/pause_generation", {"mode": "in_place"})

    def resume(self) -> None:
        """Continues after `pause`."""
        self._post("/continue_generation", {"torch_empty_cache": False})

    def begin_update(self) -> None:
        """Opens a weight-update session on the draft alone."""
        self._post("/begin_weight_update", {"selector": "draft"})

    def end_update(self) -> None:
        """Closes the session."""
        self._post("/end_weight_update", {})

    def load_draft(self, swap: str, directory: str, ranks: int) -> None:
        """Makes the loader of each rank read `directory`; what came of it is in the receipts, not in the answer."""
        message = json.dumps({"swap": swap, "directory": directory}).encode()
        payload = [(loader.MESSAGE, torch.from_numpy(np.frombuffer(message, dtype=np.uint8).copy()))]
        body = {
            # SGLang's wire format; it unpickles with an allow-list. We only ever write pickles, never read them.
            "serialized_named_tensors": [base64.b64encode(pickle.dumps(payload)).decode()] * ranks,
            "load_format": loader.IMPORT_PATH,
            "selector": "draft",
            "flush_cache": False,
        }
        self._post("/update_weights_from_tensor", body)

    def set_version(self, label: str) -> None:
        """Names the loaded drafter; requests record it from here on."""
        self._post("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    def checksums(self, selector: str) -> str:
        """SGLang's own checksum over all ranks of the `target` or the `draft`."""
        answer = self._post("/weights_checker", {"action": "checksum", "selector": selector})
        return json.dumps([r["per_gpu_checksum"] for r in answer["ranks"]])


def _probe(tokens: int) -> dict[str, Any]:
    """Sampling parameters of a request that is ours, not a user's."""
    tags = {"store": False, "domain": "probe"}
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, "custom_params": {"adaflash": tags}}
