"""A real bucket on this machine: SeaweedFS's S3, bound to loopback. `python -m tests.bucket_server` starts one for
people who want to try, until Ctrl-C: `make bucket`."""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

WEED = Path(sys.executable).with_name("weed")
_PORTS = ("master", "volume", "filer", "s3")
_REQUESTS = re.compile(r'^SeaweedFS_s3_request_seconds_count\{bucket="runs",type="(\w+)"\} (\S+)$', re.MULTILINE)
_BEGUN = """
import time, obstore
from obstore.store import from_url
bucket, end = from_url("s3://runs", retry_config={"max_retries": 0}), time.monotonic() + 60
while True:
    try:
        obstore.put(bucket, ".begun", b"")
        break
    except Exception:
        if time.monotonic() > end:
            raise
        time.sleep(0.2)
"""


@dataclass
class Seaweed:
    """A server; it can be killed and started again on the same files. On another machine, where a command leads."""

    place: Path
    host: str = "127.0.0.1"
    before: tuple[str, ...] = ()
    keys: dict[str, tuple[str, str]] = field(default_factory=dict)  # who: access key, secret
    ports: dict[str, int] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        all = ["Admin", "Read", "Write", "List"]
        rights = {"owner": all, "renewed": all, "reader": ["Read", "List"]}
        self.keys = {who: (f"{who}-{secrets.token_hex(4)}", secrets.token_hex(16)) for who in rights}
        there = [{"name": who, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": rights[who]}
                 for who, (key, secret) in self.keys.items()]  # fmt: skip
        self.ports = _free_ports()
        self.place.mkdir(exist_ok=True)
        file = os.open(self.place / "s3.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file, "w") as text:
            json.dump({"identities": there}, text)
        (self.place / "data").mkdir()

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.ports['s3']}"

    def env(self, who: str = "owner", endpoint: str = "") -> dict[str, str]:
        key, secret = self.keys[who]
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
        }

    def requests(self) -> Counter[str]:
        """How many it has answered so far about the bucket, by its own books: GET, LIST, PUT, HEAD, ..."""
        with urllib.request.urlopen(f"http://{self.host}:{self.ports['metrics']}/metrics") as said:
            return Counter({kind: int(float(count)) for kind, count in _REQUESTS.findall(said.read().decode())})

    def start(self) -> None:
        ports = [
            f"-{each}.port{grpc and '.grpc'}={self.ports[each + grpc]}" for each in _PORTS for grpc in ("", ".grpc")
        ]
        with (self.place / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *self.before, *(str(WEED), "server", f"-dir={self.place / 'data'}"),
                    *(f"-ip={self.host}", f"-ip.bind={self.host}"),
                    *("-filer", "-s3", f"-s3.config={self.place / 's3.json'}", *ports, "-master.telemetry=false"),
                    *("-s3.port.iceberg=0", "-s3.port.lance=0", f"-metricsPort={self.ports['metrics']}"),
                    *("-volume.max=100", "-master.volumeSizeLimitMB=1024"),
                ],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, preexec_fn=_dies_with_us, cwd=self.place,
            )  # fmt: skip
        self._wait()

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _wait(self) -> None:
        """Until a bucket is made: that is a put, which asks for keys and for all parts of the server."""
        env = {**os.environ, **self.env(), "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}
        words = [f"{name}={value}" for name, value in env.items() if name.startswith("AWS_")]
        command = [*(self.before or ("env",)), *words, sys.executable, "-c", _BEGUN]
        with subprocess.Popen(command, stderr=subprocess.PIPE) as asks:
            assert self.process and asks.stderr
            while asks.poll() is None:
                if self.process.poll() is not None:
                    asks.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    asks.wait(0.1)
            assert asks.returncode == 0, self.said()[-2000:] + asks.stderr.read().decode()

    def said(self) -> str:
        return (self.place / "log").read_text()


@contextlib.contextmanager
def seaweed(place: Path | None = None) -> Iterator[Seaweed]:
    """Its files are gone at the end unless somebody says where they are to be."""
    base = place or Path(tempfile.mkdtemp(prefix="seaweed-"))
    server = Seaweed(base)
    try:
        _start(server)
        yield server
    finally:
        server.kill()
        if not place:
            shutil.rmtree(base, ignore_errors=True)


def _start(server: Seaweed, tries: int = 5) -> None:
    """With other ports where somebody else has just taken one."""
    try:
        server.start()
    except AssertionError:
        if tries == 1 or "address already in use" not in server.said():
            raise
        server.kill()
        server.ports = _free_ports()
        _start(server, tries - 1)


def _free_ports() -> dict[str, int]:
    """Of those that no system hands out to whoever connects: they would be gone when the server takes them."""
    found: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        for name in ("metrics", *(each + grpc for each in _PORTS for grpc in ("", ".grpc"))):
            mine = stack.enter_context(socket.socket())
            while name not in found:
                with contextlib.suppress(OSError):
                    mine.bind(("127.0.0.1", 20_000 + secrets.randbelow(12_000)))
                    found[name] = mine.getsockname()[1]
    return found


def _dies_with_us() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def main() -> None:
    with contextlib.suppress(KeyboardInterrupt), seaweed() as server:
        words = "\n".join(f"export {name}={value}" for name, value in server.env().items())
        print(f'A bucket on this machine, until Ctrl-C. In another terminal:\n\n{words}\n\nand "BASE_DIR": "s3://runs"')
        threading.Event().wait()


if __name__ == "__main__":
    main()
