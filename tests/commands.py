"""A command run in this process: for the many that end before they start anything; imports are paid for once."""

import contextlib
import io
import json
import os
import runpy
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers import ROOT
from tests.small import KEYS, shared


def answer(*words: str, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """How `python WORDS` ends, and what it says on either stream."""
    out, errors, before = io.StringIO(), io.StringIO(), os.umask(0o077)
    module = words[0] == "-m"
    name, rest = words[module], words[module + 1 :]
    code: object = 0
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "200", **(env or {})}),
        mock.patch.object(sys, "argv", [name, *rest]),
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
        warnings.catch_warnings(action="ignore", category=Warning),  # about a test that calls a command
    ):
        try:
            if module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(name, run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
        finally:
            os.umask(before)
    assert isinstance(code, int), code
    return code, out.getvalue(), errors.getvalue()


def refused(place: Path, **keys: Any) -> str:
    """What pre-training answers to a configuration; it must refuse it in one line, and leave nothing behind."""
    file = place / "evolution.json"
    data = {"tokenizer": str(shared() / "tokenizer"), "datasets": [{"source": str(shared() / "text.jsonl")}]}
    file.write_text(json.dumps({**KEYS, **data, **keys}))
    with mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
        code, out, errors = answer("edt.py", "--config", str(file), env={"XDG_STATE_HOME": str(place)})
    assert code == 2, out + errors
    assert not (place / "runs").exists(), "nothing was begun"
    line = errors.strip()
    assert "\n" not in line, line
    return line
