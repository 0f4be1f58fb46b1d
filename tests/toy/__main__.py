"""A run of toy models: `python -m tests.toy [--config FILE] [--workers N]`."""

from fleet.method import Method
from fleet.start import main
from tests.toy.config import BESIDE, ToyConfig

ABOUT = "Train a population of vectors on a shared folder: the real run, with models that cost nothing."


def _strategy(config: ToyConfig):  # type: ignore[no-untyped-def]
    from tests.toy.strategies import strategy

    return strategy(config)


def _maker(config: ToyConfig):  # type: ignore[no-untyped-def]
    from tests.toy.maker import maker

    return maker(config)


if __name__ == "__main__":
    libraries = ("tests.toy.maker", "tests.toy.strategies")  # with NumPy, which only workers need
    main(Method("", ABOUT, ToyConfig, _strategy, _maker, off_device=BESIDE, libraries=libraries))
