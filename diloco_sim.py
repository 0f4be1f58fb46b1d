"""DiLoCo on one machine: several local workers, the very code that runs on many. `python diloco_sim.py --help`"""

from diloco import ALGORITHM, DiLoCo, __doc__
from train.training_commands import run

if __name__ == "__main__":
    run(ALGORITHM, __doc__, DiLoCo)
