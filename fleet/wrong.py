"""The error of whatever people can set right; by itself, so that nobody waits for pydantic to know it."""


class Wrong(ValueError):
    """What was given cannot be used; says where, what was seen, what is allowed and what to do."""
