"""A one-line progress bar on stderr that stays quiet when stderr is no terminal."""

from __future__ import annotations

import sys
import time
from typing import TextIO

BAR_WIDTH = 28
REDRAW_SECONDS = 0.1  # a redraw costs some 20 microseconds; ten a second look smooth


class ProgressBar:
    """Step, loss, learning rate and time left, redrawn in place."""

    def __init__(self, total_steps: int, stream: TextIO | None = None) -> None:
        self.total_steps = total_steps
        self.stream = stream or sys.stderr
        self.visible = self.stream.isatty()
        self.start = time.monotonic()
        self.drawn = 0.0

    def show(self, step: int, loss: float, learning_rate: float) -> None:
        """Redraw after ``step`` finished steps, at most ten times a second."""
        now = time.monotonic()
        if self.visible and (now - self.drawn > REDRAW_SECONDS or step == self.total_steps):
            self.drawn = now
            self.stream.write("\r" + self._line(step, loss, learning_rate, now) + "\x1b[K")
            self.stream.flush()

    def close(self) -> None:
        """End the line."""
        if self.visible and self.drawn:
            self.stream.write("\n")
            self.stream.flush()

    def _line(self, step: int, loss: float, learning_rate: float, now: float) -> str:
        filled = BAR_WIDTH * step // self.total_steps
        remaining = (now - self.start) / step * (self.total_steps - step)
        bar = "█" * filled + "·" * (BAR_WIDTH - filled)
        place = f"{bar} {step}/{self.total_steps}"
        return f"{place}  loss {loss:.3f}  lr {learning_rate:.2e}  {remaining:.0f} s left"
