"""Versions in an object store: a real S3 server on a free port."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import httpx
import pytest
import torch

from adaflash.checkpoint import load_drafter
from adaflash.remote_store import RemoteStore
from adaflash.store import StoreUnavailable, open_store
from adaflash.versions import MANIFEST, VersionError, verify
from serving.ports import free_port
from serving.worker.swap import stage
from tests.unit.test_drafter import make
from tests.unit.test_versions import reports_stay_and_old_ones_go


@pytest.fixture(scope="module")
def s3():
    """The server's address; its keys and address are in the environment, as a deployment has them."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    given = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    old = {k: os.environ.get(k) for k in given}
    os.environ.update(given)
    deadline = time.monotonic() + 60
    try:
        while True:
            try:
                httpx.put(f"{url}/drafters", timeout=2, trust_env=False).raise_for_status()
                break
            except httpx.HTTPError:
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(20)
        for k, v in old.items():
            os.environ.pop(k) if v is None else os.environ.update({k: v})


@pytest.fixture
def store(s3, request):
    return open_store(f"s3://drafters/{request.node.name.replace('[', '-').strip(']')}")


def publish(store, seed, **more):
    return store.publish(make(seed), torch.float32, target="t", parent=None, **more)


def test_what_was_published_is_what_a_worker_stages(store, tmp_path):
    assert store.numbers() == []
    manifest = publish(store, 3)
    other = open_store(store.where)
    assert other.numbers() == [0]
    directory, staged = stage(other, 0, tmp_path, "t", None)
    assert staged == manifest == verify(directory)
    drafter = load_drafter(directory)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), make(3).parameters(), strict=True))
    assert store.size(0) > 1000


def test_a_version_without_its_manifest_does_not_exist_and_its_number_is_not_used_again(store):
    publish(store, 1)
    store.fs.rm_file(store._key(0, MANIFEST))  # as a writer that died before the last object
    assert store.numbers() == []
    store.discard_unfinished()
    assert publish(store, 2).number == 1


def test_many_writers_at_once_never_share_a_number_and_no_version_is_mixed(store):
    made, failed = [], []

    def write(seed):
        try:
            made.append((seed, publish(open_store(store.where), seed)))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed
    assert sorted(m.number for _, m in made) == [0, 1, 2, 3] == store.numbers()
    for seed, m in made:
        drafter = load_drafter(store.local(m.number))
        assert torch.equal(next(drafter.parameters()), next(make(seed).parameters()))


def test_a_version_is_never_overwritten_and_half_a_claim_stops_nobody(store):
    first = publish(store, 1)
    store.fs.pipe_file(store._key(7, "claim"), b"")  # a writer that died, or whose answer was lost
    assert [publish(store, seed, least=n).number for seed, n in ((2, 0), (3, 7), (4, 20))] == [8, 9, 20]
    assert store.manifest(0) == first


@pytest.mark.parametrize(
    ("damage", "reason", "blame"),
    [
        (lambda s: s.fs.pipe_file(s._key(0, "model.safetensors"), b"torn"), "does not match the sha256", True),
        (lambda s: s.fs.rm_file(s._key(0, "model.safetensors")), "v0: model.safetensors is missing", True),
        (lambda s: s.fs.pipe_file(s._key(0, MANIFEST), b"{"), "manifest.json", True),
        (lambda s: s.fs.rm(s._key(0, ""), recursive=True), "not found: .*manifest.json", False),
    ],
)
def test_a_damaged_version_is_never_staged_and_one_that_is_not_there_is_not_blamed(
    store, tmp_path, damage, reason, blame
):
    publish(store, 1)
    damage(store)
    with pytest.raises(VersionError, match=reason) as caught:
        stage(store, 0, tmp_path, "t", None)
    assert isinstance(caught.value, StoreUnavailable) is not blame
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_cannot_make_a_worker_write_elsewhere(store, tmp_path):
    text = publish(store, 1).model_dump_json().replace("model.safetensors", "../../evil")
    store.fs.pipe_file(store._key(0, MANIFEST), text.encode())
    with pytest.raises(VersionError, match="not the name of a file"):
        stage(store, 0, tmp_path / "a" / "b", "t", None)
    assert not list(tmp_path.rglob("evil"))


def test_pruning_keeps_the_newest_those_in_use_and_every_number_taken(store):
    for seed in range(5):
        publish(store, seed)
    assert store.prune(2, {1}) == [0, 2]
    assert store.numbers() == [1, 3, 4]
    assert publish(store, 9).number == 5


def test_reports_stay_beside_the_versions_and_old_ones_of_the_gate_go(store, monkeypatch):
    reports_stay_and_old_ones_go(store, monkeypatch)


def test_a_store_that_is_not_there_is_named_in_one_line(s3):
    with pytest.raises(StoreUnavailable, match="version store s3://nowhere/x"):
        RemoteStore("s3://nowhere/x").publish(make(1), torch.float32, target="t", parent=None)
    with pytest.raises(StoreUnavailable, match="version store s3://nowhere/x"):
        RemoteStore("s3://nowhere/x").manifest(3)
    with pytest.raises(VersionError, match="version store carrier-pigeon://x"):
        open_store("carrier-pigeon://x")
