"""What takes a while and cannot tell how far it is: named at once, and again every five seconds."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

EVERY = 5.0  # seconds


@contextmanager
def saying(what: str, tell: Callable[[str], object]) -> Iterator[None]:
    began, over = time.monotonic(), threading.Event()

    def remind() -> None:
        while not over.wait(EVERY):
            tell(f"{what}, for {time.monotonic() - began:.0f} s")

    tell(what)
    thread = threading.Thread(target=remind, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def loading(what: str = "", tell: Callable[[str], object] | None = None) -> Iterator[None]:
    """Modules that take seconds to import: a collector that looks for garbage among them again and again takes a tenth
    of the time. What is there then stays, and is looked at no more."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with saying(f"loading {what}", tell) if tell else nullcontext():
            yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
