"""The analyzer's one base error."""


class AnalyzerError(Exception):
    """What went wrong, where, expected against found, and what to do next, in one line.

    Only an error of the SQL engine has more lines: they point at the position in the query.
    """
