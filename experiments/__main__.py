"""``python -m experiments``: settles what belongs to the process, then runs the command line."""

import os
import sys

# Before NumPy is imported. One thread: results do not depend on the machine's core count, and small
# products are no slower.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

if __name__ == "__main__":
    from experiments.cli import main
    from experiments.memory import keep_freed_memory

    keep_freed_memory()
    sys.exit(main())
