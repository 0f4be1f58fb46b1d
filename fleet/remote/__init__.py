"""Other machines: reached by SSH, asked by a small program that comes along, looked after by a supervisor."""
