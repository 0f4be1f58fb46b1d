"""DiLoCo on one machine: the same command as diloco.py, under the name that people look for."""

from diloco import command

if __name__ == "__main__":
    command()
