"""How this process keeps the memory that arrays leave behind."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_LARGEST_MMAP_THRESHOLD = 1 << 25  # what 64-bit glibc accepts
_NEVER = 1 << 30


def keep_freed_memory() -> None:
    """Keep freed memory for the next arrays instead of giving it back to the system; nothing but on glibc.

    Every step of a NumPy loop makes and frees the same arrays of some 100 KB. By default glibc returns such
    memory at once, and asks for it again a moment later: more than a thousand page faults a step, a tenth
    of the reference run's time. A decision for a whole process, so programs take it and libraries do not.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
