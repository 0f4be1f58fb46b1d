"""Weights in, weights out: methods, the outer step, and the files that weights travel in."""
