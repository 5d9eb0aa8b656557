"""Both ends of the rollout stream against a real Redis, including its death."""

import time
from dataclasses import replace

import pytest

from adaflash.export import ExportError, export
from adaflash.keys import Keys
from adaflash.rollouts import FIELD, unpack
from adaflash.samples import Sample, read_samples
from serving.sglang_plugin.capture import Finished
from serving.sglang_plugin.writer import QUEUE_LIMIT, RolloutWriter
from tests.unit.test_rollouts import record
from trainer.reader import GROUP, Reader

KEYS = Keys("m")
VOCABULARY = 1 << 30


class Counts:
    """Stands in for the Prometheus counters, which are process-wide."""

    def __init__(self):
        self.seen = {}

    def rollout(self, result, count=1):
        self.seen[result] = self.seen.get(result, 0) + count

    def domain(self, name):
        return name


def put(client, *records):
    for r in records:
        client.xadd(KEYS.rollouts, {FIELD: r.pack() if not isinstance(r, bytes) else r})


def named(*names, **change):
    return [record(request_id=n, **change) for n in names]


def ids(r):
    return [x.request_id for x in r.rollouts]


@pytest.fixture
def client(redis_server):
    return redis_server.client()


def test_unacknowledged_rollouts_come_again_after_a_restart_and_acknowledged_ones_do_not(redis_server, client):
    put(client, *named("a"))
    first = Reader(redis_server.url, "m", "t", VOCABULARY, 2048)
    first.acknowledge(first.collect(1, 5).entries)
    put(client, *named("b", "c"))
    assert ids(first.collect(2, 5)) == ["b", "c"]
    again = Reader(redis_server.url, "m", "t", VOCABULARY, 2048)
    assert ids(again.collect(2, 5)) == ["b", "c"]
    put(client, *named("d"))
    assert ids(again.collect(1, 5)) == ["d"]


def test_a_lost_learner_gets_its_rollouts_again(redis_server, client):
    put(client, *named("a", "b"))
    reader = Reader(redis_server.url, "m", "t", VOCABULARY, 2048)
    assert ids(reader.collect(2, 5)) == ["a", "b"]
    reader.rewind()
    assert ids(reader.collect(2, 5)) == ["a", "b"]


def test_unusable_entries_are_counted_by_reason_and_can_be_acknowledged(redis_server, client):
    put(
        client,
        b"junk",
        *named("a", target="other"),
        *named("b", output_ids=[1], accepted=[], verified=[]),
        *named("ok"),
    )
    client.xadd(KEYS.rollouts, {b"other": b"field"})
    reader = Reader(redis_server.url, "m", "t", VOCABULARY, 2048)
    r = reader.collect(2, 2)
    assert ids(r) == ["ok"]
    assert r.skipped == {"malformed": 2, "other_target": 1, "too_short": 1}
    reader.acknowledge(r.entries)
    assert client.xpending(KEYS.rollouts, GROUP)["pending"] == 0


def test_pending_entries_that_the_stream_lost_are_skipped(redis_server, client):
    put(client, *named("a", "b"))
    Reader(redis_server.url, "m", "t", VOCABULARY, 2048).collect(2, 5)
    client.xtrim(KEYS.rollouts, maxlen=0)
    put(client, *named("c"))
    assert ids(Reader(redis_server.url, "m", "t", VOCABULARY, 2048).collect(1, 5)) == ["c"]


def test_the_reader_waits_no_longer_than_told(redis_server):
    started = time.monotonic()
    assert Reader(redis_server.url, "m", "t", VOCABULARY, 2048).collect(5, 1.5).rollouts == []
    assert time.monotonic() - started < 4


def test_the_reader_goes_on_when_redis_comes_back_empty(redis_server, client):
    reader = Reader(redis_server.url, "m", "t", VOCABULARY, 2048)
    put(client, *named("a"))
    assert ids(reader.collect(1, 5)) == ["a"]
    redis_server.kill()
    assert reader.collect(1, 2).redis_error
    for file in redis_server.home.rglob("*"):
        if file.is_file():
            file.unlink()
    redis_server.start()
    put(redis_server.client(), *named("b"))
    assert ids(reader.collect(1, 5)) == ["b"]


def finished(name, **tags):
    return Finished(name, tags, [("v1", 0, 3)], [1, 2], [3, 4, 5], [2], [8], 0.0, 1.0, 1, "stop", 1.0)


def wait_for(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_writer_writes_records_that_the_reader_reads(redis_server, client):
    counts = Counts()
    writer = RolloutWriter(url=redis_server.url, model="m", target="t", telemetry=counts)
    writer.start()
    writer.offer(finished("a", domain="math", tenant="x"))
    writer.offer(finished("b", store=False))
    wait_for(lambda: counts.seen == {"written": 1, "opted_out": 1})
    ((_, fields),) = client.xrange(KEYS.rollouts)
    r = unpack(fields[FIELD])
    assert (r.request_id, r.domain, r.tenant, r.accepted, r.versions[0].version) == ("a", "math", "x", [2], "v1")


def test_a_dead_redis_costs_rollouts_and_never_time(redis_server):
    redis_server.kill()
    counts = Counts()
    writer = RolloutWriter(url=redis_server.url, model="m", target="t", telemetry=counts)
    writer.start()
    started = time.monotonic()
    for i in range(3 * QUEUE_LIMIT):
        writer.offer(finished(str(i)))
    assert time.monotonic() - started < 1
    wait_for(lambda: counts.seen.get("dropped_redis", 0) > 0)
    assert counts.seen["dropped_queue"] > 0
    redis_server.start()
    writer.offer(finished("late"))
    wait_for(lambda: counts.seen.get("written", 0) > 0, 20)


def test_a_record_that_cannot_be_built_costs_only_itself_and_shows_no_token(redis_server, client, caplog):
    counts = Counts()
    writer = RolloutWriter(url=redis_server.url, model="m", target="t", telemetry=counts)
    for f in (finished("good"), replace(finished("bad"), accepted=[9], prompt_ids=[424242]), finished("too")):
        writer.offer(f)
    writer.start()
    wait_for(lambda: counts.seen == {"written": 2, "invalid": 1})
    assert [unpack(f[FIELD]).request_id for _, f in client.xrange(KEYS.rollouts)] == ["good", "too"]
    assert "424242" not in caplog.text


def test_pending_entries_beyond_the_first_read_are_not_forgotten(redis_server, client):
    put(client, *[b"junk"] * 6, *named(*"abcdefgh"))
    Reader(redis_server.url, "m", "t", VOCABULARY, 2048).collect(50, 1.5)  # dies with all of them pending
    again = Reader(redis_server.url, "m", "t", VOCABULARY, 2048)
    seen = [i for _ in range(4) for i in ids(again.collect(2, 1.5))]
    assert seen == list("abcdefgh")


def test_prompts_longer_than_training_allows_are_skipped(redis_server, client):
    put(client, *named("long", prompt_ids=[1] * 20), *named("ok"))
    r = Reader(redis_server.url, "m", "t", VOCABULARY, 16).collect(1, 5)
    assert (ids(r), r.skipped) == (["ok"], {"prompt_too_long": 1})


def test_ids_outside_the_targets_vocabulary_are_skipped_and_counted(redis_server, client):
    put(client, *named("high", prompt_ids=[1, 500]), *named("low", prompt_ids=[1, -3]), *named("ok"))
    r = Reader(redis_server.url, "m", "t", 500, 2048).collect(1, 5)
    assert (ids(r), r.skipped) == (["ok"], {"ids_out_of_range": 2})


def test_a_round_takes_what_is_waiting_beyond_its_size_but_not_without_limit(redis_server, client):
    put(client, *named(*(str(i) for i in range(20))))
    reader = Reader(redis_server.url, "m", "t", VOCABULARY, 2048)
    assert [len(ids(reader.collect(3, 5))) for _ in range(2)] == [12, 8]


def test_rollouts_are_exported_as_samples_without_anything_but_ids(redis_server, client, tmp_path):
    put(client, *named(*"abc", domain="math"), b"junk")
    out = tmp_path / "deep" / "samples.jsonl"
    assert export(client, "m", out, count=3) == (2, 1)
    samples, skipped = read_samples(out, 100, 64)
    assert samples == [Sample([1, 2], [3, 4, 5, 6], "math", (2, 1))] * 2 and not skipped
    with pytest.raises(ExportError, match="no rollouts of other"):
        export(client, "other", out, 3)
