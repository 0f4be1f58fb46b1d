"""Training by several processes at once: torchrun's ranks, and peers that meet over the internet."""
