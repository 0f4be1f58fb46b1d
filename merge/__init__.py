"""Weights in, weights out: methods, recipes, the outer step, and the files that weights travel in."""


def __getattr__(name: str) -> object:
    """`merge.merge(recipe, out)`; whoever needs something else of this folder does not wait for it."""
    if name == "merge":
        from merge.merging import merge

        return merge
    raise AttributeError(f"module 'merge' has no attribute {name!r}")
