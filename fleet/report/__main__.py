"""`python -m fleet.report RUN_DIR`: a run as one page; `--serve` shows it live, `compare` puts several side by side."""

import gc
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from fleet import faults, help_pages
from fleet.errors import absolute
from fleet.places import address, beside, in_bucket
from fleet.plain import say
from fleet.report import comparing, serving
from fleet.report.facts import Facts
from fleet.report.page import page
from fleet.report.progress_line import ProgressLine
from fleet.report.run_reader import RunReader
from fleet.run_config import UserError
from fleet.store import Store

PORT = 8400
_EXAMPLES = """Write runs/edt/report.html, and open it:

    python -m fleet.report runs/edt

The same page live, while the run goes on; then open http://127.0.0.1:8400/ :

    python -m fleet.report runs/edt --serve

On a machine without a browser, over SSH from the one that has it:

    ssh -L 8400:127.0.0.1:8400 MACHINE python -m fleet.report runs/edt --serve 8400

Several runs on one page:

    python -m fleet.report compare runs/edt runs/diloco --out compared.html"""

app = help_pages.app("python -m fleet.report", None, _EXAMPLES)
Port = Annotated[
    int | None, Parameter(name="--serve", help=f"[PORT]: serve it live, on port {PORT} unless you name one; 0 takes a "
                          "free one.", validator=Number(gte=0, lte=65535))
]  # fmt: skip


@app.default
def report(
    run_dir: Path,
    *,
    out: Annotated[
        Path | None,
        Parameter(help="The file; RUN_DIR/report.html by default; of a bucket's run, also NAME/report.html here."),
    ] = None,
    serve: Port = None,
    host: Annotated[str, Parameter(help="Where --serve listens; only here unless you say so.")] = "127.0.0.1",
) -> None:
    """Show a run, finished or not, as one page that needs no network: report.html in its folder. It only reads the run.

    With --serve the page is live on this machine, until Ctrl-C.
    """
    if serve is not None and out:
        raise UserError("--out writes a file, --serve writes none: give one of them")
    reader = RunReader(run_dir)
    if serve is not None:
        return _serve(reader, host, serve)
    with ProgressLine() as told:
        facts = reader.look(told)
    say(_saved(page(facts), out) if out else _kept(page(facts), reader.store))


@app.command
def compare(
    *run_dirs: Path,
    out: Annotated[Path, Parameter(help="The file.")] = Path("compared.html"),
) -> None:
    """Several runs on one page: curves over tokens, time and bytes moved, and where their configurations differ.

    For example:

        python -m fleet.report compare runs/edt runs/diloco
    """
    if not 2 <= len(run_dirs) <= comparing.MOST:
        raise UserError(f"compare: {len(run_dirs)} folders of runs are given; from 2 to {comparing.MOST} are expected")
    with ProgressLine() as told:
        all = [_looked(each, told) for each in run_dirs]
    say(_saved(comparing.page(all), out))


def _looked(run_dir: Path, told: ProgressLine) -> Facts:
    try:
        return RunReader(run_dir).look(told)
    except faults.Fault as error:
        raise UserError(f"{address(run_dir)}: {error}") from None


def _serve(reader: RunReader, host: str, port: int) -> None:
    live = serving.LivePage(reader)
    with serving.server(live, host, port) as server:
        shown = f"[{host}]" if ":" in host else host
        try:
            say(f"http://{shown}:{server.server_address[1]}/  (Ctrl-C ends it)")
            with ProgressLine() as told:
                reader.look(told)  # what is read now, nobody waits for later
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say()


def _saved(text: str, file: Path) -> Path:
    """Where somebody wants it: links are followed, and what is no ordinary file is left alone."""
    if not file.name or (absolute(file).exists() and not file.is_file()):
        raise UserError(f"--out {file}: the name of a file is expected")
    umask = os.umask(0)
    os.umask(umask)
    return _written(text, file.resolve() if file.is_symlink() else file, 0o666 & ~umask)


def _kept(text: str, store: Store) -> Path:
    """In the run's folder, for whoever may read the run. A link there may be anybody's: it is replaced. Of a bucket's
    run, both there and where a browser finds it."""
    file, run = beside(store.root) / "report.html", store.root / "run.json"
    if in_bucket(store.root):
        store.replace(file.name, text.encode(errors="backslashreplace"))
        file.parent.mkdir(exist_ok=True)
    return _written(text, file, 0o600 if in_bucket(store.root) else run.stat().st_mode & 0o666)


def _written(text: str, file: Path, mode: int) -> Path:
    """Whole, or as it was before."""
    draft = ""
    try:
        handle, draft = tempfile.mkstemp(prefix=f".{file.name[:100]}.", dir=file.parent)
        with open(handle, "w", encoding="utf-8", errors="replace") as opened:
            opened.write(text)
            os.fchmod(handle, mode)
        os.replace(draft, file)
    except OSError as error:
        if draft:
            Path(draft).unlink(missing_ok=True)
        raise UserError(f"{file}: cannot be written: {error.strerror}; --out FILE puts it elsewhere") from None
    return file


def _with_port(arguments: list[str]) -> list[str]:
    """`--serve` alone means the usual port."""
    found = list[str]()
    for word, following in zip(arguments, [*arguments, ""][1:], strict=True):
        found += ["--serve", str(PORT)] if word == "--serve" and not following.lstrip("-").isdigit() else [word]
    return found


def main() -> None:
    gc.set_threshold(200_000, 50, 100)  # a long run's records all stay: to look for rubbish among them costs more
    try:
        app(_with_port(sys.argv[1:]))
    except (UserError, faults.Fault) as error:
        say(error, file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
