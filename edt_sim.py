"""EDT on one machine: several local workers, the very code that runs on many. `python edt_sim.py --help`"""

from edt import ALGORITHM, EDT, __doc__
from edt_evomerge import METHOD
from train.training_commands import run

if __name__ == "__main__":
    run(ALGORITHM, __doc__, EDT, METHOD)
