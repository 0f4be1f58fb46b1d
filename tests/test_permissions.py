"""A run's files are its user's alone; what leaves it is not."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from fleet import permissions
from fleet.permissions import keep_private, leaving
from fleet.remote.run_proxy import RunProxy
from tests.helpers import ROOT, until


@pytest.fixture(autouse=True)
def umask(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(permissions, "_hidden", 0o777)
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.parametrize("run, of_run", [(None, 0o600), (0o027, 0o640)])
def test_what_leaves_is_as_open_as_other_files(tmp_path, run, of_run):
    keep_private()
    keep_private()  # a starter's, and the command's above it
    if run is not None:  # GROUP_READABLE
        os.umask(run)
    (tmp_path / "run").touch()
    with pytest.raises(ZeroDivisionError), leaving():
        (tmp_path / "model").touch()
        raise ZeroDivisionError
    (tmp_path / "more").touch()
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("run", "model", "more")] == [of_run, 0o640, of_run]


def test_so_is_what_a_launcher_has_exported(tmp_path):
    keep_private()
    proxy = RunProxy(tmp_path)
    proxy.folder = tmp_path
    proxy.follow(["-c", "open('model', 'w')"], finish=True)
    until(lambda: proxy.followed()["code"] == 0, "the model is there")
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o640


def test_and_what_it_has_exported_elsewhere(tmp_path):
    (tmp_path / "far.py").write_text("open('model', 'w')")
    ask = {"verb": "become", "with": {"code": str(tmp_path), "module": "far", "words": []}}
    words = [sys.executable, "-c", "from fleet.remote import agent; agent.main('')"]
    subprocess.run(words, input=json.dumps(ask), text=True, cwd=ROOT, check=True)
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o640


def test_who_hides_all_and_lets_the_group_read_a_run_lets_it_read_the_model(tmp_path):
    os.umask(0o077)
    keep_private()
    os.umask(0o027)
    with leaving():
        (tmp_path / "model").touch()
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o640
