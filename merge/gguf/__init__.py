"""Models as GGUF files, llama.cpp's format: read as donors, written, checked, and turned back into folders."""

from merge.gguf.checking import info, verify_gguf
from merge.gguf.folder import gguf_to_hf
from merge.gguf.header import Gguf, read_gguf
from merge.gguf.reading import open_gguf
from merge.gguf.writing import export_gguf

__all__ = ["Gguf", "export_gguf", "gguf_to_hf", "info", "open_gguf", "read_gguf", "verify_gguf"]
