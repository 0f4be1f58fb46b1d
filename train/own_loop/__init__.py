"""Somebody else's training loop as the maker of members: his model, his optimizers, his data."""
