"""Models are vectors, text is noise: known arithmetic in the shape of the real methods."""
