"""The installed SGLang is compared with the known one, and what differs decides what is served."""

import json
import shutil

import pytest

from serving.sglang_plugin import SUPPORTED_SGLANG, guard
from serving.worker import launch
from serving.worker.config import WorkerConfig


@pytest.fixture
def copy(tmp_path):
    """The touched files of the installed SGLang, to be changed."""
    for file in {n.partition(":")[0] for names in guard.TOUCHED.values() for n in names}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(guard.package() / file, tmp_path / file)
    return tmp_path


def change(root, file, old, new):
    text = (root / file).read_text()
    assert old in text
    (root / file).write_text(text.replace(old, new))


def test_the_installed_sglang_is_the_one_the_plugin_was_written_to():
    report = guard.inspect()
    assert (report.version, report.changed) == (SUPPORTED_SGLANG, {})
    assert json.loads(guard.FILE.read_text())["sglang"] == SUPPORTED_SGLANG


def test_a_changed_planner_leaves_whole_blocks_and_a_changed_worker_leaves_the_safe_mode(copy, monkeypatch):
    planner = "srt/speculative/dspark_components/dspark_planner.py"
    change(copy, planner, "def _shift_to_lag(", "def _shift_to_lag_renamed(")
    look = guard.inspect
    monkeypatch.setattr(guard, "inspect", lambda: look(copy))
    report = look(copy)
    assert report.against("adaptive") and not report.against("dspark")
    c = WorkerConfig(model="m", verify="adaptive", verify_rule="length")
    safer, reason = launch.safest(c)
    assert (safer.route, safer.verify) == ("dspark", "static")
    assert "HostConfidenceBudgetPlanner" in reason
    with pytest.raises(launch.UnknownSGLang, match="lock file"):
        launch.safest(c.model_copy(update={"strict": True}))

    change(copy, "srt/models/dspark.py", "class DSparkDraftMixin", "class Other")
    assert launch.safest(c)[0].route == "dflash"
    assert launch.safest(WorkerConfig(model="m", route="none"))[1] == ""


def test_without_what_every_route_needs_the_target_is_served_alone(copy, monkeypatch):
    change(copy, "srt/managers/auxiliary_output.py", "class CommittedTokens", "class Renamed")
    report = guard.inspect(copy)
    monkeypatch.setattr(guard, "inspect", lambda: report)
    assert launch.safest(WorkerConfig(model="m"))[0].route == "none"


def test_a_comment_elsewhere_in_a_file_changes_nothing(copy):
    file = copy / "srt/speculative/dspark_components/dspark_planner.py"
    file.write_text("# a comment\n" + file.read_text())
    assert guard.inspect(copy).changed == {}
