"""The error of whatever people can set right; by itself, so that nobody waits for pydantic to know it."""


class Wrong(ValueError):
    """What was given cannot be used; says where, what was seen, what is allowed and what to do."""


def first_line(error: BaseException) -> str:
    """What a stranger's error says, in a line; of an error that says nothing, what it is called."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
