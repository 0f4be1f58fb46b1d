"""Models as GGUF files, llama.cpp's format: written, read, checked, and turned back into Hugging Face folders.

>>> export_gguf("winner", "winner.gguf", "Q8_0")
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from evomerge.utils import expected
from merge import gguf

P, T = ParamSpec("P"), TypeVar("T")


def _expected(function: Callable[P, T]) -> Callable[P, T]:
    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        with expected():
            return function(*args, **kwargs)

    return called


export_gguf = _expected(gguf.export_gguf)
read_gguf = _expected(gguf.read_gguf)
gguf_to_hf = _expected(gguf.gguf_to_hf)
verify_gguf = _expected(gguf.verify_gguf)
info = _expected(gguf.info)
