"""Words for shells, and supervisors: nothing of a user's becomes a command, and no worker is left to itself."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest

from fleet.host import Host
from fleet.machines import Machine
from fleet.remote import agent, engines
from fleet.remote.agent_link import command
from fleet.run import create_run
from tests.helpers import ROOT, until
from tests.lab import disks
from tests.toy.config import ToyConfig

HOSTILE = [
    "'",
    '"',
    "$(touch hacked)",
    "`touch hacked`",
    "; touch hacked #",
    "\\",
    "!",
    "*",
    "&&",
    "|",
    ">x",
    "é",
    "~",
    " ",
]


def hostile(rng: random.Random) -> str:
    return "".join(rng.choice([*HOSTILE, "a", "B", "7", "/", "-", "="]) for _ in range(rng.randint(1, 12)))


def spoken(words: list[str], machine: Machine, folder: Path, asks: list[dict]) -> list[dict]:
    """What agent.py answers when a login shell is given the command, as sshd does."""
    source = Path(agent.__file__).read_bytes()
    lines = b"".join(json.dumps(ask).encode() + b"\n" for ask in asks)
    done = subprocess.run(
        [*words, command(machine, "@x ")], input=f"{len(source)}\n".encode() + source + lines, capture_output=True,
        cwd=folder, timeout=60, env={**os.environ, "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")},
    )  # fmt: skip
    lines = [line for line in done.stdout.decode().splitlines() if line.startswith("@x ")]
    assert lines, done.stderr.decode()
    return [json.loads(line[3:]) for line in lines]


# -- nothing of a user's is ever a command -----------------------------------------------------------------------------


@pytest.mark.parametrize("shell", [["bash", "-c"], ["sh", "-c"]], ids=lambda words: words[0])
def test_no_value_of_the_users_becomes_a_command(tmp_path, shell):
    rng = random.Random(7)
    for n in range(12):
        python = tmp_path / f"py {hostile(rng).replace('/', '_')}{n}"
        python.symlink_to(sys.executable)
        base = tmp_path / f"{hostile(rng).replace('/', '_')}{n}"
        base.mkdir()
        machine = Machine(host="h", name="h", python=str(python), setup="true" if n % 2 else None)
        said = spoken(shell, machine, tmp_path, [{"verb": "show", "with": {"base": str(base), "token": "t"}}])
        assert said[0]["ready"] and said[1]["free"], said
        assert (base / f".check-{os.getuid()}" / "t").read_text() == "t"
    assert not list(tmp_path.rglob("hacked"))


def test_what_a_machine_s_setup_says_is_not_taken_for_an_answer(tmp_path):
    machine = Machine(host="h", name="h", python=sys.executable, setup="echo '@y {}'; echo noise; export SEEN=here")
    asks = [{"verb": "facts", "with": {"packages": ["numpy", "no-such-package"]}}]
    facts = spoken(["sh", "-c"], machine, tmp_path, asks)[1]
    assert facts["versions"]["numpy"] and not facts["versions"]["no-such-package"] and facts["cores"] >= 1


def test_workers_get_their_environment_as_it_is(tmp_path):
    """Whatever the values are, from the order's JSON to the worker's environment no shell sees them."""
    rng = random.Random(11)
    env = {f"V{n}": "".join(hostile(rng) for _ in range(3)) for n in range(30)}
    script = tmp_path / "code" / "worker.py"
    script.parent.mkdir()
    (tmp_path / "code" / "fleet").symlink_to(ROOT / "fleet")
    script.write_text("import json, os, sys\njson.dump(dict(os.environ), open(sys.argv[3] + '/seen', 'w'))\n")
    run, run_id = made_run(tmp_path)
    machine = Machine(host="h", name="h", python=sys.executable)
    order = an_order(run, run_id, ["worker.py"])
    ask = {"verb": "start", "with": {"code": str(script.parent), "order": order, "env": env}}
    state = spoken(["sh", "-c"], machine, tmp_path, [ask])[1]
    assert state["seats"][0]["pid"]
    seen = until(lambda: (run / "seen").exists() and (run / "seen").read_text(), "the worker wrote")
    assert {key: value for key, value in json.loads(seen).items() if key in env} == env
    assert not list(tmp_path.rglob("hacked"))


# -- supervisors -------------------------------------------------------------------------------------------------------


def made_run(place: Path) -> tuple[Path, str]:
    store, _ = create_run(place / "base", "run", ToyConfig().bound(), Host())
    return place / "base" / "run", store.run_id


def an_order(run: Path, run_id: str, words: list[str], **more: object) -> dict:
    usual: dict[str, object] = {
        "launch": 1, "machine": "h", "digest": "d", "restarts": 2, "seats": [{}], "first": 0, "lock": run_id,
        "umask": 0o077,
    }  # fmt: skip
    return {"run": str(run), "run_id": run_id, "command": words, **usual, **more}


def started(tmp_path: Path, body: str, monkeypatch: pytest.MonkeyPatch, **more: object) -> tuple[Path, str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code = tmp_path / "code"
    code.mkdir()
    (code / "fleet").symlink_to(ROOT / "fleet")
    (code / "w.py").write_text(body)
    run, run_id = made_run(tmp_path)
    agent.start(str(code), an_order(run, run_id, ["w.py"], **more), {})
    return run, run_id


def supervisor_of(run: Path) -> dict:
    return json.loads((run / "workers" / "h.supervisor").read_text())


def test_a_worker_that_crashes_is_started_again_but_not_for_ever(tmp_path, monkeypatch):
    run, run_id = started(tmp_path, "raise SystemExit(7)", monkeypatch)
    seat = until(lambda: (seat := supervisor_of(run)["seats"][0])["code"] is not None and seat, "it gives up")
    assert (seat["code"], seat["crashes"], seat["said"]) == (7, 3, "ended with code 7")
    assert (run / "workers" / "h-0.log").read_text().count("ended with code 7; another takes its place") == 2
    until(lambda: not agent.running(run_id)["processes"], "the supervisor ends, too")


def test_a_worker_that_ended_well_is_not_started_again(tmp_path, monkeypatch):
    run, run_id = started(tmp_path, "raise SystemExit(0)", monkeypatch, seats=[{}, {"A": "1"}])
    until(lambda: [seat["code"] for seat in supervisor_of(run)["seats"]] == [0, 0], "both ended")
    until(lambda: not agent.running(run_id)["processes"], "the supervisor ends, too")


# What a worker does first of all: it takes its GPUs, and here says which.
TAKES = """
import os, sys
from pathlib import Path
from fleet import gpus
name, run = sys.argv[sys.argv.index("--worker") + 1:][:2]
gpus.choose(name, 2)
Path(run, f"saw-{name.split('-')[-2]}").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
"""


def test_workers_of_a_machine_take_its_gpus_in_turn(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    run, run_id = started(tmp_path, TAKES, monkeypatch, seats=[{}, {}, {}, {"CUDA_VISIBLE_DEVICES": "6"}])
    until(lambda: [seat["code"] for seat in supervisor_of(run)["seats"]] == [0, 0, 0, 0], "all ended")
    assert [(run / f"saw-{n}").read_text() for n in range(4)] == ["4,5", "6,7", "4,5", "6"]
    until(lambda: not agent.running(run_id)["processes"], "the supervisor ends, too")


@pytest.mark.parametrize("task, mine", [("0", "0,1"), ("3", "2,3")])
def test_tasks_of_a_slurm_job_that_all_see_the_nodes_gpus_take_them_in_turn(tmp_path, monkeypatch, task, mine):
    """The number of the task on its node counts, not that within the job."""
    (tmp_path / "w.py").write_text(TAKES)
    with tarfile.open(tmp_path / "code.tar", "w") as tar:
        tar.add(tmp_path / "w.py", "w.py")
        for file in (ROOT / "fleet").rglob("*.py"):
            tar.add(file, str(file.relative_to(ROOT)), recursive=False)
    digest = hashlib.sha256((tmp_path / "code.tar").read_bytes()).hexdigest()
    run, run_id = made_run(tmp_path)
    code = {"tar": str(tmp_path / "code.tar"), "digest": digest}
    words = json.dumps({**code, "order": an_order(run, run_id, ["w.py"]), "env": {}})
    slurm = {"SLURM_PROCID": "9", "SLURM_LOCALID": task, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    subprocess.run(
        [sys.executable, "-P", "-c", engines._program(), words, "9"], check=True, timeout=60, capture_output=True,
        env={**os.environ, **slurm, "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )  # fmt: skip
    assert (run / f"saw-{task}").read_text() == mine


def test_a_crew_passes_the_word_on_and_can_be_killed_with_all_its_own(tmp_path, monkeypatch):
    stubborn = "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen('up', 'w')\n"
    stubborn += "if os.fork() == 0: os.setsid()\ntime.sleep(600)"
    run, run_id = started(tmp_path, stubborn, monkeypatch)
    until(lambda: (tmp_path / "code" / "up").exists(), "it is up")
    until(lambda: len(agent.running(run_id)["processes"]) == 3, "supervisor, worker and child")
    with pytest.raises(agent.Problem, match="another supervisor of this run is there already"):
        monkeypatch.setattr(agent, "_marked", lambda run_id: [])
        agent.start(str(tmp_path / "code"), an_order(run, run_id, ["w.py"]), {})
    monkeypatch.undo()
    assert agent.ask_to_end(run_id) == {"asked": 1}
    assert agent.kill(run_id, 10.0)["left"] == []
    assert agent.running(run_id) == {"processes": []} and supervisor_of(run)["seats"][0]["code"] == -signal.SIGKILL


def test_a_crew_refuses_another_run_than_the_one_that_was_meant(tmp_path, monkeypatch):
    run, _ = started(tmp_path, "", monkeypatch)
    with pytest.raises(agent.Problem, match="another run than the one that was meant"):
        agent.start(str(tmp_path / "code"), an_order(run, "other", ["w.py"]), {})
    with pytest.raises(agent.Problem, match="not the folder of a run; is the shared disk mounted"):
        agent.start(str(tmp_path / "code"), an_order(tmp_path / "base" / "nothing", "x", ["w.py"]), {})


def test_a_worker_that_the_kernel_killed_for_its_memory_is_told_from_others(tmp_path, monkeypatch, small_memory):
    hungry = f"import os\nopen('{small_memory(64)}/cgroup.procs', 'w').write(str(os.getpid()))\nx = b'x' * (1 << 29)"
    run, _ = started(tmp_path, hungry, monkeypatch, restarts=0)
    seat = until(lambda: (seat := supervisor_of(run)["seats"][0])["code"] is not None and seat, "it is killed")
    assert seat["said"] == "was killed by SIGKILL when the machine was out of memory"


@pytest.mark.parametrize("trap", ["link", "pipe"])
def test_a_trap_in_the_place_of_a_log_leads_nowhere(tmp_path, monkeypatch, trap):
    target = tmp_path / "target"
    target.write_text("mine\n")
    run, _ = made_run(tmp_path)
    log = run / "workers" / "h-0.log"
    log.symlink_to(target) if trap == "link" else os.mkfifo(log)
    run, run_id = started(tmp_path, "raise SystemExit(0)", monkeypatch)
    assert until(lambda: supervisor_of(run)["seats"][0]["said"], "it says so").startswith("cannot be started: ")
    assert target.read_text() == "mine\n"
    assert agent.kill(run_id, 10.0)["left"] == []


@pytest.mark.slow
def test_a_crew_goes_on_where_a_mount_that_died_is_mounted_again(tmp_path, monkeypatch):
    if why := disks.why_not("bindfs"):
        pytest.skip(why)
    waits = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)\nraise SystemExit(7)"
    with disks.mounted("bindfs", tmp_path / "base", tmp_path / "behind") as disk:
        run, run_id = started(tmp_path, waits, monkeypatch, restarts=1)
        until(lambda: (run / "workers" / "h.supervisor").exists(), "it has told of itself")
        disk.die()
        (tmp_path / "code" / "go").touch()
        until(lambda: len(agent.running(run_id)["processes"]) == 1, "its worker has ended")
        disk.unmount()
        disk.mount()

        def ended():
            with suppress(FileNotFoundError):  # where one file takes another's place, such a mount may show neither
                return (seat := supervisor_of(run)["seats"][0])["code"] is not None and seat

        seat = until(ended, "it says how it ended")
        assert (seat["code"], seat["crashes"]) == (7, 2), "another one was started there"
        until(lambda: not agent.running(run_id)["processes"], "the supervisor ends, too")
