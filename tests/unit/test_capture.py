"""Rollout capture on scheduler batches: what is recorded for which request."""

from types import SimpleNamespace

import pytest

from serving.sglang_plugin import capture as module
from serving.sglang_plugin.capture import Capture


class Telemetry:
    def __init__(self):
        self.seen = []

    def finished(self, f):
        self.seen.append(f.request_id)


@pytest.fixture
def sglang(monkeypatch):
    """The two SGLang functions that a finished request needs."""
    monkeypatch.setitem(
        __import__("sys").modules,
        "sglang.srt.runtime_context",
        SimpleNamespace(get_serving=lambda: SimpleNamespace(weight_version="v3")),
    )
    monkeypatch.setitem(
        __import__("sys").modules,
        "sglang.srt.utils.weight_versions",
        SimpleNamespace(
            compute_weight_version_spans=lambda events, current_version, num_output_tokens: [
                SimpleNamespace(version=current_version, start=0, end=num_output_tokens)
            ]
        ),
    )


class Request:
    def __init__(self, rid, custom=None):
        self.rid, self.origin_input_ids, self.output_ids, self.done = rid, [1, 2], [], False
        self.finished_len, self.weight_version_events = None, []
        self.sampling_params = SimpleNamespace(custom_params=custom, temperature=0.0, top_p=1.0, top_k=1)
        self.finished_reason = SimpleNamespace(to_json=lambda: {"type": "length"})

    def finished(self):
        return self.done

    def emit(self, *tokens, last=False):
        start = len(self.output_ids)
        self.output_ids += tokens
        self.done = last
        return SimpleNamespace(token_ids=tokens, output_index=start)


def test_steps_of_interleaved_requests_end_in_the_right_records(sglang):
    got, telemetry = [], Telemetry()
    c = Capture(8, got.append, telemetry)
    a, b = Request("a", {"adaflash": {"domain": "x"}}), Request("b")
    c.consume(SimpleNamespace(reqs=[a, b]), [a.emit(10), b.emit(20)], None, None)
    c.consume(SimpleNamespace(reqs=[a, b]), [a.emit(11, 12), b.emit(21, last=True)], [2, 4], None)
    c.consume(SimpleNamespace(reqs=[a]), [a.emit(13, last=True)], [5], [3])
    first, second = got
    assert (first.request_id, first.output_ids, first.accepted, first.verified) == ("b", [20, 21], [1], [8])
    assert (second.request_id, second.accepted, second.verified) == ("a", [2, 1], [8, 3])
    assert (second.tags, second.versions, second.finish_reason) == ({"domain": "x"}, [("v3", 0, 4)], "length")
    assert telemetry.seen == ["b", "a"]
    assert not c._running


def test_rows_without_new_tokens_are_not_steps(sglang):
    got = []
    c = Capture(8, got.append, Telemetry())
    a = Request("a")
    c.consume(SimpleNamespace(reqs=[a]), [a.emit(10)], None, None)
    c.consume(SimpleNamespace(reqs=[a]), [None], [3], None)
    c.consume(SimpleNamespace(reqs=[a]), [a.emit(11, last=True)], [1], None)
    assert got[0].accepted == [1]


def test_aborted_requests_are_forgotten_after_a_while(sglang, monkeypatch):
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    c = Capture(8, lambda f: None, Telemetry())
    gone, other = Request("gone"), Request("other")
    c.consume(SimpleNamespace(reqs=[gone]), [gone.emit(1)], None, None)
    now = 4000.0
    c.consume(SimpleNamespace(reqs=[other]), [other.emit(1)], None, None)
    assert list(c._running) == ["other"]


def test_a_failure_inside_capture_stays_inside(caplog):
    counted = []
    step = module.StepOnHost(
        SimpleNamespace(_telemetry=SimpleNamespace(capture_failed=lambda: counted.append(1))), None, None
    )
    step.consume(SimpleNamespace(reqs=[]), [])
    assert counted == [1]
    assert "rollout capture failed" in caplog.text


def test_a_token_from_a_second_prefill_is_a_step_of_its_own(sglang):
    """After a retraction SGLang prefills again; the record still adds up to the output."""
    got = []
    c = Capture(8, got.append, Telemetry())
    a = Request("a")
    for tokens, accepted in (((10,), None), ((11, 12), [2]), ((13,), None)):
        c.consume(SimpleNamespace(reqs=[a]), [a.emit(*tokens)], accepted, None)
    c.consume(SimpleNamespace(reqs=[a]), [a.emit(14, last=True)], [1], None)
    assert (got[0].accepted, got[0].verified) == ([2, 1, 1], [8, 1, 8])
    assert sum(got[0].accepted) == len(got[0].output_ids) - 1
