"""Metrics where people look: tables, TensorBoard, wandb, trackio; each point once, and never in a worker's way."""
