"""The family tree of a run: who descends from whom, and how well each did."""
