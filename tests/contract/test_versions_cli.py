"""`adaflash versions` on a real store, and on a real Redis where use matters."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from typer.testing import CliRunner

from adaflash.cli import app
from adaflash.keys import Keys
from adaflash.registry import Registry
from adaflash.store import VersionStore
from tests.contract.test_release_and_registry import entry
from tests.release import activate
from tests.unit.test_drafter import make


@pytest.fixture
def store(tmp_path):
    """Six versions; the last one came through a gate."""
    s = VersionStore(tmp_path / "store")
    for n in range(5):
        s.publish(make(n), torch.float32, target="t", parent=n - 1 if n else None)
    s.publish(make(5), torch.float32, target="t", parent=4, gate={"tau_active": 1.5, "tau_candidate": 1.75, "why": "x"})
    return s


@pytest.fixture
def released(redis_server):
    """v4 is active, v1 was before, a worker still runs v0."""
    for number in (1, 4):
        activate(redis_server.client(), Keys("m"), number)
    Registry(redis_server.client(), Keys("m")).announce(entry("w", version="v0"))
    return redis_server


def run(*arguments, code=0):
    done = CliRunner().invoke(app, ["versions", *map(str, arguments)], env={"COLUMNS": "160"})
    assert done.exit_code == code, done.output
    return done.output


def test_ls_shows_the_gate_and_who_uses_what(store, released):
    text = run("ls", "--versions", store.root, "--name", "m", "--redis-url", released.url)
    rows = {line.split()[1]: line for line in text.splitlines() if re.match(r"\W+v\d", line)}
    assert list(rows) == [f"v{n}" for n in range(6)]
    assert "1.50 -> 1.75" in rows["v5"]
    assert "active" in rows["v4"] and "previous" in rows["v1"] and "worker w" in rows["v0"]


def test_what_was_rejected_is_listed_with_the_reason_latest_first(store):
    store.report("round-0000000007", {"at": 7.0, "why": "may be chance", "gate": {}})
    store.report("v3", {"at": 9.0, "who": "gateway-a", "why": "acceptance length 1.20 on the canary"})
    lines = run("rejected", "--versions", store.root).splitlines()
    found = [line for line in lines if "v3" in line or "round-" in line]
    assert re.search("v3 .*gateway-a .*acceptance length 1.20", found[0])
    assert re.search("round-0000000007 .*the gate .*may be chance", found[1])
    assert "was rejected" in next(r for r in run("ls", "--versions", store.root).splitlines() if "v3" in r)
    assert json.loads(run("show", "3", "--versions", store.root))["rejected"]["who"] == "gateway-a"


def test_show_prints_the_manifest_and_diff_what_moved(store):
    assert json.loads(run("show", "5", "--versions", store.root))["parent"] == 4
    text = run("diff", "v4", "5", "--versions", store.root)
    assert "v5: parent 4, gate: x" in text
    assert "layers.0.mlp.up_proj.weight" in text
    assert "0.0000" in run("diff", "4", "4", "--versions", store.root)


def test_verify_names_what_is_wrong_and_fails(store):
    assert run("verify", "--versions", store.root).count("sound") == 6
    file = store.path(2) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    text = run("verify", "--versions", store.root, code=1)
    assert "v2: model.safetensors does not match" in text
    assert text.count("sound") == 5
    assert "v3: sound" in run("verify", "v3", "--versions", store.root)


def test_gc_deletes_only_on_demand_and_never_what_is_in_use(store, released):
    arguments = ("gc", "--versions", store.root, "--name", "m", "--redis-url", released.url, "--keep", "3")
    assert "would delete: v2" in run(*arguments)
    assert store.numbers() == list(range(6))
    assert "deleted: v2" in run(*arguments, "--yes")
    assert store.numbers() == [0, 1, 3, 4, 5]


def test_a_damaged_version_is_listed_as_such(store):
    shutil.rmtree(store.path(3))
    store.path(3).mkdir()
    assert "damaged" in run("ls", "--versions", store.root)
