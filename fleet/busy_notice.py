"""What takes a while and cannot tell how far it is: named at once, and again every five seconds."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
