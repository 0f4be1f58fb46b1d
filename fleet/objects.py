"""A bucket through the few requests that the protocol needs, each failing by name. `obstore` makes them: it keeps the
connections, tries again what failed in passing, and finds credentials."""

import builtins
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fleet import faults
from fleet.credentials import may_be_plain, settings_for
from fleet.errors import Lacking, UserError, first_line

if TYPE_CHECKING:
    from obstore.store import ObjectStore

PIECE = 1 << 24  # bytes of a part that is uploaded, or of a range that is read
_AT_ONCE = 3  # parts that are on their way, ranges that are read ahead
_CLIENT: dict[str, Any] = {"connect_timeout": timedelta(seconds=5), "timeout": timedelta(seconds=60)}
_RETRY: dict[str, Any] = {"max_retries": 4, "retry_timeout": timedelta(seconds=15)}

T = TypeVar("T")


class About(NamedTuple):
    """What a bucket tells of an object."""

    tag: str
    size: int
    written: float


class Objects:
    """The objects below one address; names are relative to it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.ops = self.bytes_read = 0  # requests, and bytes, for the event log and the benchmarks
        self.seconds = 0.0  # that its first user has waited
        self._user = threading.get_ident()
        self._obstore, self._bucket = _connected(address)

    def get(self, name: str, limit: int) -> bytes:
        """A whole small object; one byte more than the limit shows that there is more."""
        data = bytes(self._call(name, self._first, name, limit + 1)[0])
        self.bytes_read += len(data)
        return data

    def put(self, name: str, data: bytes, new: bool = False) -> None:
        """With `new`, only where nothing has that name; of several who do so at once, one succeeds."""
        mode = "create" if new else "overwrite"
        self._call(name, self._obstore.put, self._bucket, name, data, mode=mode, use_multipart=False)

    def about(self, name: str) -> About:
        try:
            found = self._call(name, self._obstore.head, self._bucket, name)
        except (faults.Denied, faults.Passing) as fault:
            if _UNSAID in str(fault):  # who asks without wanting anything is refused without being told why
                self._call(name, self._first, name, 1)
            raise
        return About(found["e_tag"] or "", found["size"], found["last_modified"].timestamp())

    def list(self, folder: str) -> builtins.list[str]:
        """The names directly below one, objects and what has objects below it."""
        found = self._call(folder, self._obstore.list_with_delimiter, self._bucket, f"{folder}/" if folder else None)
        names = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
        self.ops += len(names) // 1000  # so many are told at a time
        prefix = f"{folder}/" if folder else ""
        inner = (name.removeprefix(prefix).rstrip("/") for name in names if name.startswith(prefix))
        return [name for name in inner if name]  # some stores tell of the folder itself

    def below(self, folder: str) -> builtins.list[tuple[str, int, float]]:
        """Every object below a name, wherever: its name, its size, and when it was written."""
        pages: Any = self._call(folder, self._obstore.list, self._bucket, f"{folder}/" if folder else None)
        all = [each for page in self._call(folder, builtins.list[Any], pages) for each in page]
        found = [(each["path"], each["size"], each["last_modified"].timestamp()) for each in all]
        self.ops += len(found) // 1000
        return sorted(found)

    def remove(self, *names: str) -> None:
        """Whether they are there or not."""
        if names:
            self._call(names[0], self._obstore.delete, self._bucket, [*names])

    def writer(self, name: str) -> "ObjectWriter":
        return ObjectWriter(self, name)

    def pieces(self, name: str) -> Iterator[bytes]:
        """A large object, range by range, the next ones on their way."""
        first = self._call(name, self._begun, name, PIECE)
        self.bytes_read += (size := first.meta["size"] if first else 0)
        begins, ahead = iter(range(PIECE, size, PIECE)), ThreadPoolExecutor(_AT_ONCE)

        def ask(count: int) -> Iterator[Future[Any]]:
            for begin in islice(begins, count):
                yield ahead.submit(self._range, name, begin, min(PIECE, size - begin))

        coming = deque(ask(_AT_ONCE))  # before the first one is there
        try:
            yield self._body(name, first) if first else b""
            while coming:
                piece = coming.popleft().result()
                coming.extend(ask(1))
                yield piece
        finally:
            ahead.shutdown(wait=False, cancel_futures=True)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _first(self, name: str, most: int) -> tuple[bytes, int]:
        """So much of the beginning, and how much there is."""
        found = self._begun(name, most)
        return (bytes(found.bytes()), found.meta["size"]) if found else (b"", 0)

    def _begun(self, name: str, most: int) -> Any:
        """So much of the beginning, on its way."""
        try:
            return self._obstore.get(self._bucket, name, options={"range": (0, most)})
        except Exception as error:
            if "416" not in first_line(error):  # nothing in it, so no range of it
                raise
            return None

    def _body(self, name: str, found: Any) -> Any:
        self.ops -= 1  # it was counted when it was asked for
        return memoryview(self._call(name, found.bytes))

    def _range(self, name: str, begin: int, length: int) -> Any:
        """As a view: it is not copied for being handed on."""
        return memoryview(self._call(name, self._obstore.get_range, self._bucket, name, start=begin, length=length))

    def _call(self, name: str, call: Callable[..., T], *args: Any, requests: int = 1, **settings: Any) -> T:
        """Counted; what the bucket refuses becomes a fault that says where."""
        self.ops += requests
        began = time.perf_counter()
        try:
            return call(*args, **settings)
        except Exception as error:
            raise named(error, f"{self.address}/{name}") from error
        finally:
            if threading.get_ident() == self._user:
                self.seconds += time.perf_counter() - began


class ObjectWriter:
    """A private object while it is being written, part by part; nobody sees any of it before `sync`."""

    def __init__(self, objects: Objects, name: str) -> None:
        self._objects, self._name = objects, name
        self._file: Any = objects._obstore.open_writer(
            objects._bucket, name, buffer_size=PIECE, max_concurrency=_AT_ONCE
        )
        self._parts, self._size = 0, 0

    def write(self, data: bytes | memoryview) -> None:
        for begin in range(0, len(data), PIECE):  # or what it holds would grow with what it is given
            part = data[begin : begin + PIECE]
            self._size += len(part)
            self._call(self._file.write, part)
        while self._parts < self._size // PIECE:
            self._parts += 1
            self._objects.ops += 1

    def flush(self) -> None:
        """What makes a part is on its way already."""

    def sync(self) -> None:
        if file := self._file:
            self._file = None
            self._call(file.close)
            self._objects.ops += 1 if not self._parts else 2  # begun and ended, or one put

    def close(self) -> None:
        """Without `sync` before, nothing of it remains to be seen."""
        self._file = None

    def _call(self, call: Callable[..., Any], *args: Any) -> None:
        self._objects._call(self._name, call, *args, requests=0)  # they are made by the part


def _connected(address: str) -> "tuple[Any, ObjectStore]":
    try:
        import obstore
        from obstore.store import from_url
    except ImportError:
        raise Lacking("a run in a bucket needs obstore: pip install -r requirements-bucket.txt") from None
    try:
        client = _CLIENT | ({"allow_http": True} if may_be_plain() else {})
        connect: Any = from_url
        return obstore, connect(address, client_options=client, retry_config=_RETRY, **settings_for(address))
    except Exception as error:
        raise UserError(f"{address}: cannot be used as a bucket's address: {first_line(error)}") from None


_UNSAID = "non-2xx status code: 4"
_ADDRESS = re.compile(r"\S*/\S*")  # which may have any word in it
_CODE, _MESSAGE = re.compile(r"<Code>([^<]*)</Code>"), re.compile(r"<Message>([^<]*)</Message>")
_REFUSED = (
    *("AccessDenied", "ExpiredToken", "InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"),
    *("TokenRefreshRequired", "RequestTimeTooSkewed", "AllAccessDisabled", "403 Forbidden", "401 Unauthorized"),
)
_FULL = ("QuotaExceeded", "InsufficientStorage", "507 ", "StorageFull", "XMinioStorageFull")


def named(error: Exception, where: str) -> faults.Fault:
    """The fault that a client's error means."""
    text, kind = str(error), type(error).__name__
    code, message = (found[1] if (found := each.search(text)) else "" for each in (_CODE, _MESSAGE))
    said = f"{where}: {': '.join(filter(None, [code, message])) or _plainly(text)}"
    if code == "NoSuchBucket":
        return faults.Unfit(said)
    if isinstance(error, FileNotFoundError):
        return faults.Missing(said)
    if kind in ("AlreadyExistsError", "PreconditionError"):
        return faults.Exists(said)
    if "/latest/api/token" in text or "redential" in _ADDRESS.sub("", text) and not code:
        return faults.Denied(f"{where}: no credentials are found for it: neither in the environment, nor in a profile")
    if code == "RequestTimeTooSkewed":
        return faults.Denied(f"{said} Set this machine's clock.")
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or any(each in text for each in _REFUSED):
        return faults.Denied(said)
    if any(each in text for each in _FULL):
        return faults.Full(said)
    if kind in ("InvalidPathError", "NotSupportedError"):
        return faults.Unfit(said)
    return faults.Passing(said)


def _plainly(text: str) -> str:
    """What a client says of a server that gave no reason: the first line, without what stands there for debugging."""
    return text.partition("Debug source")[0].strip().replace("\n", " ")[:300]
