"""A proxy before a bucket that does what networks and stores do: refuse, fail, hang up, lose a reply, send twice; and
it counts requests as the store is asked them."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Fault = str  # "" none; "429", "500", "503" answered instead; "cut" the upload; "lose" the reply; "twice"
_REPLIES = {
    "429": ("429 Too Many Requests", "SlowDown", "Retry-After: 1\r\n"),
    "500": ("500 Internal Server Error", "InternalError", ""),
    "503": ("503 Service Unavailable", "SlowDown", ""),
    "403": ("400 Bad Request", "ExpiredToken", ""),
    "skew": ("403 Forbidden", "RequestTimeTooSkewed", ""),
    "404": ("404 Not Found", "NoSuchBucket", ""),
}


@dataclass
class Request:
    method: str
    path: str
    number: int
    key: str  # who asks


@dataclass
class BucketProxy:
    upstream: int
    decide: Callable[[Request], Fault] = lambda request: ""
    ignores_conditions: bool = False  # as stores do that know no conditional puts
    seen: Counter[str] = field(default_factory=Counter)  # methods, and LIST
    faults: Counter[str] = field(default_factory=Counter)
    port: int = 0
    _number: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                body = await reader.readexactly(_length(head))
                if not await self._answer(head, body, writer):
                    break
        with contextlib.suppress(OSError):
            writer.close()

    async def _answer(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> bool:
        method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
        self._number += 1
        self.seen["LIST" if method == "GET" and "list-type=2" in path else method] += 1
        key = head.partition(b"Credential=")[2].partition(b"/")[0].decode()
        fault = self.decide(Request(method, path, self._number, key))
        self.faults[fault] += bool(fault)
        if fault in _REPLIES:
            status, code, more = _REPLIES[fault]
            text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>said by the proxy</Message></Error>"
            writer.write(f"HTTP/1.1 {status}\r\n{more}Content-Length: {len(text)}\r\n\r\n{text}".encode())
            await writer.drain()
            return True
        for _ in range(2 if fault == "twice" else 1):
            reply = await self._forward(
                head, body[: len(body) // 2] if fault == "cut" else body, method, fault == "cut"
            )
        if fault in ("cut", "lose"):
            return False
        if self.ignores_conditions and reply.startswith(b"HTTP/1.1 412"):
            reply = b'HTTP/1.1 200 OK\r\nETag: "0"\r\nContent-Length: 0\r\n\r\n'
        writer.write(reply)
        await writer.drain()
        return True

    async def _forward(self, head: bytes, body: bytes, method: str, cut: bool) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        try:
            writer.write(head + body)
            await writer.drain()
            if cut:
                return b""
            answer = await reader.readuntil(b"\r\n\r\n")
            while answer.startswith(b"HTTP/1.1 100"):
                answer = await reader.readuntil(b"\r\n\r\n")
            if method == "HEAD" or answer[9:12] in (b"204", b"304"):
                return answer
            if b"transfer-encoding: chunked" in answer.lower():
                return answer + await _chunks(reader)
            return answer + await reader.readexactly(_length(answer))
        finally:
            writer.close()


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    found = b""
    while True:
        size = await reader.readline()
        found += size + await reader.readexactly(int(size, 16) + 2)
        if int(size, 16) == 0:
            return found


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


@contextlib.contextmanager
def proxied(upstream: int) -> Iterator[BucketProxy]:
    proxy, ready = BucketProxy(upstream), threading.Event()
    loop = asyncio.new_event_loop()

    async def main() -> None:
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=1 << 26)
        proxy.port = server.sockets[0].getsockname()[1]
        ready.set()
        try:
            await asyncio.Event().wait()
        finally:
            for each in asyncio.all_tasks() - {asyncio.current_task()}:
                each.cancel()

    task = loop.create_task(main())

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait(10)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(10)
