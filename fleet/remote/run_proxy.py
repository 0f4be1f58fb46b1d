"""The run's folder, as the launcher needs it: here, or on a machine that sees it when this one does not."""

import base64
import codecs
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Group

from fleet import faults, launches, permissions, worker_notes
from fleet.console import console
from fleet.history import History
from fleet.host import Host
from fleet.places import in_bucket
from fleet.plain import plain
from fleet.recipe import NotYet
from fleet.remote import code
from fleet.remote.agent_link import Link
from fleet.run import NoRun, make_base, open_run
from fleet.run_config import UserError
from fleet.status import View, printed

_LOG = 1 << 16  # so much of a log's end is shown at first


class RunProxy:
    """Every verb takes and gives plain data, so that it can be asked over a wire as well."""

    def __init__(self, root: Path) -> None:
        self._root = root  # where the method's script lies
        self._view: View | None = None
        self._follower: subprocess.Popen[bytes] | None = None
        self._new = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # what was read may end within a letter

    def base(self, base: str) -> None:
        if not in_bucket(Path(base)):  # there are only names
            make_base(Path(base), Host())

    def create(self, command: list[str], file: str, text: str) -> dict[str, Any]:
        """Make the run, or join it: the method's own script does that, since it knows what the run is bound to."""
        *said, last = self._script([*command, "--make"], file, text).strip().splitlines()
        made = dict(json.loads(last))
        self.open(made["folder"])
        self._new = made["new"]
        return {**made, "notes": [line for line in said if line.startswith("Note: ")]}

    def preview(self, command: list[str], file: str, text: str) -> str:
        """What the method's script says of the configuration; nothing is made."""
        return self._script([*command, "--look"], file, text).strip()

    def _script(self, command: list[str], file: str, text: str) -> str:
        with tempfile.TemporaryDirectory() as draft:
            if text:
                file = str(Path(draft, "evolution.json"))
                Path(file).write_text(text, encoding="utf-8")
            words = [sys.executable, *command, "--config", file]
            done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=self._root)
        if done.returncode:
            why = "\n".join([line for line in done.stderr.strip().splitlines() if line.strip()][-8:])
            raise UserError(why.replace(file, "evolution.json") if text else why)
        return done.stdout

    def open(self, folder: str) -> str:
        """Of a run that is there; its id."""
        self.folder = Path(folder)
        self.store, _ = open_run(self.folder, Host(), f"launcher-{os.getpid()}")
        return self.store.run_id

    def peek(self, folder: str) -> str:
        """The id of a run that may not be there yet."""
        try:
            return self.open(folder)
        except NoRun:
            return ""

    def begin(
        self, operational: dict[str, Any], digest: str, data: str, joining: bool, command: str, seats: int
    ) -> dict[str, Any]:
        """Where somebody works already, theirs is the launch; or a new one. The code is put where all find it."""
        now = self.state()
        if joining and now["launch"] and not now["why"]:
            if now["code"] != digest:
                raise UserError(
                    f"launch {now['launch']} of this run is at work with other code ({now['code'][:12]}) than what "
                    f"lies here ({digest[:12]}): stop it first, or launch from the code that it runs"
                )
            return {"launch": now["launch"], "new": False}
        code.keep(self.store, code.Code(digest, base64.b64decode(data), {}))
        return {"launch": launches.begin(self.store, operational, digest, command, seats), "new": True}

    def state(self) -> dict[str, Any]:
        history = History(self.store)
        with contextlib.suppress(NotYet, faults.Passing):
            history.look_far()
        launch = launches.latest(self.store)
        known = self.store.confirmed(launches.path(launch, "start")) if launch else {}
        return {
            "over": history.over, "ended": launches.ended(self.store), "launch": launch,
            "code": str(known.get("code", "")), "why": launches.ordered(self.store, launch) if launch else "",
        }  # fmt: skip

    def supervisors(self) -> list[dict[str, Any]]:
        """What the supervisors wrote down; anybody may have written there, and nothing is done about it."""
        found = []
        for name in sorted(self.store.names("workers")):
            if name.endswith(".supervisor"):
                with contextlib.suppress(Exception):  # whatever it holds
                    known = json.loads(self.store.news(f"workers/{name}"))
                    seats = [{**seat, "code": seat["code"] and int(seat["code"])} for seat in known["seats"][:64]]
                    # machines' own clocks may be anything
                    ago = max(0.0, worker_notes.now(self.store) - self.store.stamp(f"workers/{name}")[2] / 1e9)
                    found.append({**known, "seats": seats, "ago": ago, "launch": int(known["launch"])})
        return found

    def picture(self, width: int, color: bool, lines: int = 0) -> dict[str, Any]:
        """What the status view shows, drawn for a terminal of this width; and for so many lines of it."""
        self._view = self._view or View(self.folder)
        text, launch, why = io.StringIO(), 0, ""
        with contextlib.suppress(faults.Passing):  # then there is no news this time
            screen, parts = console(text, width, color), self._view.picture(lines, width)
            screen.print(Group(*parts)) if lines else printed(screen, parts)
            launch = launches.latest(self.store)
            why = launches.ordered(self.store, launch) if launch else ""
        return {
            "text": text.getvalue(), "over": self._view.over, "silent": self._view.silent, "why": why, "launch": launch
        }  # fmt: skip

    def follow(self, command: list[str], finish: bool) -> None:
        """Let a process of the method's own script say how the run gets on, since it knows what is to be said of it:
        from its beginning, if that was here. It ends with this one."""
        more = [*["--finish"] * finish, *["--begun"] * self._new]
        words = [sys.executable, *command, "--follow", str(self.folder), *more]
        self._follower = subprocess.Popen(
            words, cwd=self._root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, umask=permissions.begun_with(),
        )  # fmt: skip
        assert self._follower.stdout
        os.set_blocking(self._follower.stdout.fileno(), False)

    def followed(self) -> dict[str, Any]:
        """What it has said since the last time; and its exit code, once it has one."""
        assert self._follower and self._follower.stdout
        code = self._follower.poll()
        return {"text": self._decoder.decode(self._follower.stdout.read() or b""), "code": code}

    def stop(self, why: str) -> int:
        if launch := launches.latest(self.store):
            launches.stop(self.store, launch, why)
        return launch

    def logs(self, wanted: str, seen: dict[str, int]) -> list[tuple[str, int, str]]:
        """(name, how far, text) of each log that has grown beyond what was seen."""
        found = []
        for name in sorted(self.store.names("workers")):
            if not name.endswith(".log") or wanted not in ("", name.rpartition("-")[0]):
                continue
            with contextlib.suppress(faults.Fault):
                new = self.store.tail(f"workers/{name}", seen.get(name, 0), _LOG if name not in seen else 1 << 30)
                if new.data:
                    found.append((name.removesuffix(".log"), new.size, new.data.decode(errors="replace")))
        return found

    def clean(self) -> dict[str, int]:
        """Old code and dead drafts; the caller has made sure that nobody works."""
        kept = f"{self.state()['code']}.tar"
        old = [f"{code.FOLDER}/{name}" for name in self.store.names(code.FOLDER) if name != kept]
        drafts = [f"tmp/{name}" for name in self.store.names("tmp")]
        for name in [*old, *drafts]:
            with contextlib.suppress(faults.Fault):
                self.store.remove(name)
        return {"code": len(old), "drafts": len(drafts)}

    def ask(self, verb: str, **words: Any) -> Any:
        return getattr(self, verb)(**words)


class RemoteRunProxy:
    """The same proxy, on another machine: answers come over the wire."""

    def __init__(self, link: Link, digest: str, data: str, env: Mapping[str, str]) -> None:
        self._link = link
        found = link.ask("receive", digest=digest, data="") or link.ask("receive", wait=60, digest=digest, data=data)
        link.ask("become", code=found["code"], module="fleet.remote.run_proxy", words=[link.prefix], env=dict(env))

    def ask(self, verb: str, **words: Any) -> Any:
        return self._link.ask(verb, wait=600.0 if verb in ("create", "preview") else 15.0, **words)["answer"]


def main(prefix: str) -> None:
    """Be the far end of a RemoteRunProxy."""
    permissions.keep_private()
    proxy = RunProxy(Path.cwd())
    for line in sys.stdin:
        ask = json.loads(line)
        try:
            answer = {"answer": proxy.ask(ask["verb"], **ask["with"])}
        except (UserError, faults.Fault) as error:
            answer = {"problem": plain(error, 2000)}
        except Exception as error:  # this end must not die of it
            answer = {"problem": f"{type(error).__name__}: {plain(error, 500)}"}
        print(prefix + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
