"""Bad input ends in one clear line that names the key, and exit code 1."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from adaflash.checkpoint import load_drafter, save_drafter
from adaflash.cli import app
from adaflash.config import ConfigError, load
from adaflash.drafter import random_drafter
from adaflash.drafter_config import DrafterConfigError
from serving.gateway.config import GatewayConfig
from serving.worker import launch
from serving.worker.config import WorkerConfig
from trainer.config import TrainerConfig

ROOT = Path(__file__).resolve().parents[2]


def cli(*args, **env):
    command = [sys.executable, "-m", "adaflash.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | env, timeout=120)


def assert_one_line(done, text):
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("adaflash:")]
    assert len(lines) == 1, done.stderr
    assert text in lines[0]
    assert "Traceback" not in done.stderr


def test_an_unknown_key_in_a_file_is_named(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('model = "m"\nprot = 3\n')
    with pytest.raises(ConfigError, match="prot"):
        load(WorkerConfig, file)


def test_an_unknown_nested_key_is_named():
    with pytest.raises(ConfigError, match=r"round\.stepz"):
        load(TrainerConfig, None, model="m", round={"stepz": 3})


def test_an_unknown_environment_variable_is_named(monkeypatch):
    monkeypatch.setenv("ADAFLASH_WORKER_PROT", "3")
    with pytest.raises(ConfigError, match="ADAFLASH_WORKER_PROT"):
        load(WorkerConfig, None, model="m")


def test_lists_are_given_as_json_on_the_command_line():
    from adaflash.cli import settings
    from adaflash.errors import UserError

    given = settings(['engine_args=["--tp-size", "2"]', "port=1"])
    assert load(WorkerConfig, None, model="m", **given).engine_args == ["--tp-size", "2"]
    with pytest.raises(UserError, match="JSON list"):
        settings(["engine_args=[--tp-size"])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"verify": "adaptive"}, "profile-verify"),
        ({"verify": "shadow", "route": "dflash", "verify_rule": "length"}, "needs route dspark"),
        ({"verify": "sometimes"}, "verify"),
    ],
)
def test_verify_settings_that_cannot_work_say_what_to_change(changes, text):
    with pytest.raises(ConfigError, match=text):
        load(WorkerConfig, None, model="m", **changes)


def test_command_line_beats_environment_beats_file(tmp_path, monkeypatch):
    file = tmp_path / "c.toml"
    file.write_text('model = "m"\nport = 1\nops_port = 2\nhost = "f"\n')
    monkeypatch.setenv("ADAFLASH_WORKER_PORT", "11")
    monkeypatch.setenv("ADAFLASH_WORKER_OPS_PORT", "12")
    c = load(WorkerConfig, file, port=111)
    assert (c.port, c.ops_port, c.host) == (111, 12, "f")


def test_a_gateway_without_keys_listens_on_loopback_only():
    assert load(GatewayConfig, None, name="m").host == "127.0.0.1"
    with pytest.raises(ConfigError, match="api_keys"):
        load(GatewayConfig, None, name="m", host="0.0.0.0")


def test_secrets_stay_out_of_a_printed_config():
    c = load(GatewayConfig, None, name="m", api_keys=["sesame"])
    assert "sesame" not in repr(c)


def test_a_missing_config_file_is_one_line():
    assert_one_line(cli("worker", "--config", "nowhere.toml"), "nowhere.toml does not exist")


def test_a_missing_model_setting_is_one_line():
    assert_one_line(cli("worker"), "model: Field required")


def test_refused_redis_is_one_line_without_the_password(target_dir):
    url = "redis://:secret@127.0.0.1:1/0"
    done = cli("worker", "--model", target_dir, "--redis-url", url)
    assert_one_line(done, "redis://:***@127.0.0.1:1/0 does not answer")
    assert "secret" not in done.stderr


def test_drafter_init_refuses_layers_outside_the_target(target_dir, tmp_path):
    done = cli("drafter", "init", "--target", target_dir, "--out", str(tmp_path / "d"), "--layer-ids", "1,9")
    assert_one_line(done, "target_layer_ids [9] are outside the target's 0..3")
    assert not (tmp_path / "d").exists()


def test_drafter_init_refuses_a_path_without_a_model(tmp_path):
    assert_one_line(
        cli("drafter", "init", "--target", str(tmp_path), "--out", str(tmp_path / "d")), "config.json is missing"
    )


OFFLINE = [
    *(["drafter", x] for x in ("init", "inspect", "convert")),
    *([x] for x in ("pretrain", "fit-length-head", "eval", "rollouts")),
]


def test_help_explains_every_command():
    runner = CliRunner()
    for command in ([], ["worker"], ["gateway"], ["trainer"], ["demo"], *OFFLINE, ["model"]):
        done = runner.invoke(app, [*command, "--help"])
        assert done.exit_code == 0
        assert len(done.output) > 200


def test_help_is_quick_because_it_imports_nothing_heavy():
    code = (
        "import sys, adaflash.cli; sys.exit(any(m in sys.modules for m in ('torch', 'sglang', 'ray', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_worker_agent_does_not_import_sglang():
    code = "import sys, serving.worker.agent; sys.exit('sglang' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_configuration_page_is_the_generated_one():
    from scripts.make_config_docs import OUT, render

    assert OUT.read_text() == render()


def test_a_sliding_drafter_is_refused_on_the_cpu_platform(drafter_dir, target_dir, tmp_path):
    config = load_drafter(drafter_dir / "weak").config
    change = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8}
    save_drafter(random_drafter(config.model_copy(update=change), 0), tmp_path, torch.float32)
    with pytest.raises(DrafterConfigError, match="not served on the CPU"):
        launch.check_drafter(target_dir, tmp_path)


def test_an_admin_key_that_looks_like_an_option_is_still_a_key():
    command = launch.command(load(WorkerConfig, None, model="m", admin_key="-x y"), None, Path())
    parser = argparse.ArgumentParser()
    parser.add_argument("--admin-api-key")
    assert parser.parse_known_args(command)[0].admin_api_key == "-x y"
