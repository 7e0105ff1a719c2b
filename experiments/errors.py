"""What can go wrong before training starts, as one line for a person."""


class ExperimentError(Exception):
    """The command can not be carried out as things stand: exit code 1."""


class UsageError(ExperimentError):
    """The command itself is wrong: exit code 2."""
