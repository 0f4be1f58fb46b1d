"""DiLoCo on one machine: the same command as diloco.py, under the name that people look for."""

from diloco import ALGORITHM, DiLoCo, __doc__
from train.training_commands import run

if __name__ == "__main__":
    run(ALGORITHM, __doc__, DiLoCo)
