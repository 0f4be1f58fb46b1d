"""The page of a run that goes on: answers GET and HEAD on this machine, changes nothing, and reads only what is new."""

import contextlib
import errno
import hashlib
import io
import ipaddress
import re
import resource
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fleet import faults
from fleet.plain import say
from fleet.report.formatting import text
from fleet.report.page import page
from fleet.report.page_parts import document, policy
from fleet.report.run_reader import RunReader
from fleet.run_config import UserError

_EVERY = 2.0  # seconds between two looks at the disk, however many ask
_REST = 9.0  # so much longer than a look took: the page of a long run takes a tenth of one core at most
_PATIENCE = 20.0  # seconds that somebody may take to ask, and to take the answer
_HEAD = 1 << 14  # bytes of a question
_CLIENTS = 64  # at once; fewer where fewer files may be open
_END = re.compile(rb"\r?\n\r?\n")
_QUIET = 10.0  # seconds until a run that says nothing is looked at again: silence means something, too


class LivePage:
    """The page as it is now, made afresh when the run has moved on."""

    def __init__(self, reader: RunReader) -> None:
        self.reader, self._lock = reader, threading.Lock()
        self._stamp: object = None
        self._looked = self._made = float("-inf")
        self._took, self._over = 0.0, False
        self.page, self.tag = b"", ""
        self.looks = 0  # how often the run was read

    def now(self) -> tuple[bytes, str]:
        with self._lock:
            now = time.monotonic()
            if now - self._looked >= max(_EVERY, _REST * self._took):
                self._refresh(now)
                self._looked = time.monotonic()
                self._took = self._looked - now
            return self.page, self.tag

    def _refresh(self, now: float) -> None:
        try:
            stamp = self.reader.stamp()
            if self.page and stamp == self._stamp and (self._over or now - self._made < _QUIET):
                return
            facts = self.reader.look()
            self._over, said = facts.over, page(facts, live=True)
        except Exception as error:  # the disk may come back, and whatever else is odd may be mended
            said = str(error) if isinstance(error, (UserError, faults.Fault)) else f"{type(error).__name__}: {error}"
            why = f"<header><h1>The run cannot be read now</h1></header><main><p>{text(said, 1000)}</p></main>"
            stamp, said = None, document("trouble", why, live=True)
        self.looks += 1
        self._stamp, self._made, self.page = stamp, now, said.encode(errors="replace")
        self.tag = f'"{hashlib.sha256(self.page).hexdigest()[:32]}"'


def server(live: LivePage, host: str, port: int) -> ThreadingHTTPServer:
    """Listening already; a port in use is told in one line."""
    names = {"localhost", host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return _Server(family, (host, port), _handler(live.now, names))
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        other = "port" if getattr(error, "errno", 0) in (errno.EADDRINUSE, errno.EACCES) else "host"
        raise UserError(f"--host {host} --serve {port}: cannot listen there: {why}; name another {other}") from None


class _Server(ThreadingHTTPServer):
    """Whoever comes is served: when there are too many, those who have been there longest must go."""

    daemon_threads, request_queue_size = True, 128

    def __init__(self, family: int, *words: Any) -> None:
        self.address_family = family
        self.most = max(4, min(_CLIENTS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._there: dict[socket.socket, None] = {}  # the longest first
        self._changing = threading.Lock()
        super().__init__(*words)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:  # no file descriptor is free, say: it would be asked again at once
            self._leave_room(len(self._there) - 1)
            time.sleep(0.1)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        self._leave_room(self.most - 1)
        with self._changing:
            self._there[request] = None
        super().process_request(request, client_address)

    def _leave_room(self, most: int) -> None:
        with self._changing:
            for each in [*self._there][: max(0, len(self._there) - max(0, most))]:
                del self._there[each]
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)  # its thread finds out, and closes it

    def shutdown_request(self, request: Any) -> None:
        with self._changing:
            self._there.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):  # those who left are nobody's trouble
            say(traceback.format_exc(), file=sys.stderr)


def _handler(now: Callable[[], tuple[bytes, str]], names: set[str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version, timeout = "report", "", _PATIENCE

        def handle(self) -> None:
            """What is asked is read in whole before it is looked at: within bounds, however slowly it comes."""
            head, end = b"", time.monotonic() + _PATIENCE
            while (left := end - time.monotonic()) > 0 and len(head) < _HEAD and not _END.search(head):
                self.connection.settimeout(left)
                if not (part := self.connection.recv(_HEAD)):
                    break
                head += part
            self.connection.settimeout(_PATIENCE)
            if _END.search(head):
                self.rfile = io.BytesIO(head)
                super().handle()

        def do_GET(self) -> None:
            if not known(self.headers.get("Host", ""), names):
                self._answer(
                    421, b"This page is not served under that name: use the address, or start it with --host NAME.\n"
                )
            elif self.path.partition("?")[0] != "/":
                self._answer(404, b"There is only one page: /\n")
            else:
                said, tag = now()
                self._answer(304 if self.headers.get("If-None-Match") == tag else 200, said, tag)

        do_HEAD = do_GET

        def _answer(self, code: int, said: bytes, tag: str = "") -> None:
            self.send_response(code)
            head = {"Content-Type": f"text/{'html' if tag else 'plain'}; charset=utf-8", "Cache-Control": "no-store",
                    "Content-Security-Policy": policy(live=True) + "; frame-ancestors 'none'", "ETag": tag,
                    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
                    "Cross-Origin-Resource-Policy": "same-origin"}  # fmt: skip
            for name, value in head.items():
                if value:
                    self.send_header(name, value)
            said = b"" if code == 304 else said
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else said)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def known(host: str, names: set[str]) -> bool:
    """An address, or a name that we have ourselves. A page elsewhere that gives its own name this machine's address
    would read along; its name stands in the request."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    if name.lower().removesuffix(".") in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
