"""Exit codes that scripts may rely on."""

FINE = 0
ERROR = 1
USAGE = 2
FINDINGS = 3
INTERRUPTED = 130
