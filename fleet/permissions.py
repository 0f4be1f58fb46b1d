"""Who may read what is written: a run's files are its user's alone; a finished model is as open as his other files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_hidden = 0o777  # of all files, by the mask that this process began with


def keep_private() -> None:
    global _hidden
    _hidden &= os.umask(0o077)


def begun_with() -> int:
    """The mask of a process that keeps private what it writes: for others that it starts, who do so by themselves."""
    return _hidden


@contextmanager
def leaving() -> Iterator[None]:
    """Files that are made meanwhile are for whoever the user lets read what he makes."""
    now = os.umask(0o077)
    os.umask(now & _hidden)
    try:
        yield
    finally:
        os.umask(now)
