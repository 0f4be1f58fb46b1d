"""EDT on one machine: the same command as edt.py, under the name that people look for."""

from edt import command

if __name__ == "__main__":
    command()
