"""Models as GGUF files, llama.cpp's format: read as donors, written, checked, and turned back into folders."""
