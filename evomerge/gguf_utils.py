"""Models as GGUF files, llama.cpp's format: written, read, checked, and turned back into Hugging Face folders.

>>> export_gguf("winner", "winner.gguf", "Q8_0")
"""

from evomerge.utils import expected
from merge.gguf import checking, header, writing

export_gguf = expected()(writing.export_gguf)
read_gguf = expected()(header.read_gguf)
gguf_to_hf = expected()(writing.gguf_to_hf)
verify_gguf = expected()(checking.verify_gguf)
info = expected()(checking.info)
