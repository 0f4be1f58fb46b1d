"""The launcher for toys: `python -m tests.toy.launch [COMMAND]`."""

from pathlib import Path

from fleet.remote.commands import main

METHODS = ("matching", "diloco", "rank", "search", "tournament")

if __name__ == "__main__":
    main(dict.fromkeys(METHODS, ("-m", "tests.toy")), Path(__file__).parents[2], __doc__)
