"""The recorder's one base error."""


class RecorderError(Exception):
    """What went wrong, where, expected against found, and what to do next, in one line."""
