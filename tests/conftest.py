"""One BLAS thread, as the reference experiments have, set before anything imports NumPy.

Bit-for-bit comparisons between this process and others hold only for one thread count.
"""

import os

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"
