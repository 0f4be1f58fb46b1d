"""EDT on one machine: the same command as edt.py, under the name that people look for."""

from edt import ALGORITHM, EDT, __doc__
from edt_evomerge import METHOD
from train.training_commands import run

if __name__ == "__main__":
    run(ALGORITHM, __doc__, EDT, METHOD)
