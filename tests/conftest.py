"""One BLAS thread, as the reference experiments have, set before anything imports NumPy; a shared fixture.

Bit-for-bit comparisons between this process and others hold only for one thread count.
"""

import os
from pathlib import Path

import pytest

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Directory of a run that does not exist yet."""
    return tmp_path / "run"
