"""The error of whatever people can set right; by itself, so that nobody waits for pydantic to know it."""

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

# How errors begin, or what they hold, after which every call to the device fails in this process, and in no other: of
# its driver and runtime (torch's, Triton's), of its libraries, of the network between devices.
_SPOILED = (
    *("AcceleratorError", "CUDA error", "CUDA driver error", "HIP error", "Triton Error [", "device-side assert"),
    *("CUBLAS_STATUS", "CUDNN_STATUS", "cuDNN error", "CUSOLVER_STATUS", "CUSPARSE_STATUS", "CUFFT_", "NCCL error"),
    *("cudaGetDeviceCount", "No CUDA GPUs are available"),
)
_NO_ROOM = ("out of memory", "ALLOC_FAILED")  # then nothing was begun, and all else is as it was


class UserError(ValueError):
    """What was given cannot be used; says where, what was seen, what is allowed and what to do."""


class Lacking(UserError):
    """This machine has not got what is needed (a file, a package, a GPU, room); another one may have it."""


def refuse(problems: Iterable[tuple[object, str]]) -> None:
    """Complain of the first one that is there."""
    if found := next((what for there, what in problems if there), ""):
        raise UserError(found)


def absolute(path: Path) -> Path:
    """From the user's home on, and through all links; or why it leads nowhere."""
    with _leading(path):
        return from_home(path).resolve()


def from_home(path: Path | str) -> Path:
    """`~/model`, as the system finds it; or why it leads nowhere. What is not there yet may be made."""
    with _leading(path):
        found = Path(path).expanduser()
        with _mounts_that_may_come_back():
            found.exists()  # a name may be too long, or lie where this user may not look
        os.fsencode(found), str(found).encode()  # libraries that read models open no other names
        return found


@contextlib.contextmanager
def _leading(path: Path | str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:  # links in a circle; nobody knows where this user is at home
        raise UserError(f"{path}: no such place: {getattr(error, 'strerror', None) or error}") from None
    except UnicodeEncodeError:
        of = sys.getfilesystemencoding()
        locale = f"a locale of {of} cannot name it; set LC_ALL=C.UTF-8, or PYTHONUTF8=1"
        why = locale if of != "utf-8" else "its name is no UTF-8; choose another one, which all libraries can open"
        raise UserError(f"{path}: no such place: {why}") from None


@contextlib.contextmanager
def _mounts_that_may_come_back() -> Iterator[None]:
    """Such a place is there; whoever uses it says what is the matter with it."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOTCONN, errno.ESTALE, errno.EIO, errno.ETIMEDOUT):
            raise


def first_line(error: BaseException) -> str:
    """What a stranger's error says, in a line; of an error that says nothing, what it is called."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def cut(text: str, most: int = 20_000) -> str:
    """A text for people: of one that nobody could read to its end, the beginning, and how much there was."""
    return text if len(text) <= most else f"{text[:most]} ... and {len(text) - most:,} more characters"


def spoils(error: BaseException) -> bool:
    """Whether this process can use its device no more after such an error."""
    if not isinstance(error, RuntimeError):
        return False
    said = "".join(traceback.format_exception_only(error))  # it may have no words
    return any(sign in said for sign in _SPOILED) and not any(words in said for words in _NO_ROOM)


def cause_chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and what it came of, though it may not show that: the latest first."""
    seen, each = set[int](), error
    while each is not None and id(each) not in seen:
        yield each
        seen.add(id(each))
        each = each.__cause__ or each.__context__  # type: ignore[assignment]
