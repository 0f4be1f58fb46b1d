"""One Slurm job holds all workers, one in each task."""

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from fleet.run_config import UserError


@dataclass(frozen=True)
class Slurm:
    python: str
    options: Sequence[str]
    program: str
    words: str

    def plan(self, tasks: int, threads: int, run_id: str, folder: str) -> str:
        """The script. srun tells each task its number, and Slurm its devices."""
        log = f"{folder}/workers/slurm-%j.log"
        if not log.isprintable() or any(c in log for c in "\"'\\"):
            raise UserError(f"{folder!r}: sbatch cannot be told such a name")
        lines = [
            "#!/bin/bash",
            f"#SBATCH --job-name={_name(run_id)}",
            f"#SBATCH --ntasks={tasks}",
            f"#SBATCH --cpus-per-task={threads}",
            f'#SBATCH --output="{log}"',
            *(f"#SBATCH {option}" for option in self.options),
            "",
            "# Each task checks the code by its hash, copies it to its machine, and runs one worker from there.",
            f"words={shlex.quote(self.words)}",
            f"program={shlex.quote(self.program)}",
            f"python={shlex.quote(self.python)}",
            "exec srun --kill-on-bad-exit=0 bash -c"
            " 'exec \"$0\" -P -c \"$1\" \"$2\" \"$SLURM_PROCID\"' \"$python\" \"$program\" \"$words\"",
            "",
        ]  # fmt: skip
        return "\n".join(lines)

    def start(self, tasks: int, threads: int, run_id: str, folder: str) -> str:
        return f"Slurm job {_ask(['sbatch', '--parsable'], self.plan(tasks, threads, run_id, folder))}"

    def kill(self, run_id: str) -> str:
        """Its supervisors get a signal that makes them kill their workers, and write it down."""
        _ask(["scancel", "--me", f"--name={_name(run_id)}", "--signal=QUIT"])
        return "Its job was told to end at once."

    def working(self, run_id: str) -> int:
        return len(_ask(["squeue", "--me", "--noheader", f"--name={_name(run_id)}"]).splitlines())


def _name(run_id: str) -> str:
    return f"fleet-{run_id}"


def _ask(command: list[str], text: str = "") -> str:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not here: run this on a machine that can submit Slurm jobs") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]} does not answer: is Slurm's controller up?") from None
    if done.returncode:
        raise UserError(f"{command[0]}: {done.stderr.strip()}")
    return done.stdout.strip()
