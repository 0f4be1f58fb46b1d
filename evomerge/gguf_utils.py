"""Models as GGUF files, llama.cpp's format: written, read, checked, and turned back into Hugging Face folders.

>>> export_gguf("winner", "winner.gguf", "Q8_0")
"""

from evomerge.utils import expected
from merge import gguf

export_gguf = expected()(gguf.export_gguf)
read_gguf = expected()(gguf.read_gguf)
gguf_to_hf = expected()(gguf.gguf_to_hf)
verify_gguf = expected()(gguf.verify_gguf)
info = expected()(gguf.info)
