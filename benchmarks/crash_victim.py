"""A recording run that waits to be killed, and a witness file of what it had done by then.

    python -m benchmarks.crash_victim RUN WITNESS FIRST_STEP SCENARIO

Each mark goes to the operating system by one system call, so it outlives the process. Every number that is
recorded follows from its step: ``benchmarks.crash`` knows what each row has to hold.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recorder import Recorder

TENSOR_COUNT = 40
SIDE = 16  # of each square weight
TOKEN_COUNT = 2
EVENT_STEPS = 20  # an event at every 20th step
NAN_STEPS = 3  # at every third, the first gradient has a NaN
NOTE = "note"

BORN, RECORDED, FLUSH_BEGUN, FLUSHED, NOTED = range(5)
"""What a mark says: the process is up; a step was recorded; a flush began, ended; an event was logged."""
MARK = np.dtype([("kind", np.int64), ("step", np.int64), ("seconds", np.float64)])
"""``seconds`` of the monotonic clock, which all processes of one machine share and nobody sets back."""


@dataclass(frozen=True)
class Scenario:
    """How the victim spends its time."""

    name: str
    step_seconds: float
    long_step_seconds: float = 0.0
    long_step_every: int = 0  # 0 is never
    flush_steps: int = 0  # flush after every so many steps; 0 leaves it to the recorder

    def seconds(self, step: int) -> float:
        """Duration of a step."""
        is_long = self.long_step_every and step % self.long_step_every == self.long_step_every - 1
        return self.long_step_seconds if is_long else self.step_seconds


SCENARIOS = (
    Scenario("steps", 0.002),
    Scenario("flushes", 0.0, flush_steps=8),
    Scenario("long-step", 0.002, long_step_seconds=4.0, long_step_every=50),
)


def main(arguments: list[str]) -> None:
    """Record until killed."""
    run, witness_path, first_step, scenario_name = arguments
    scenario = {s.name: s for s in SCENARIOS}[scenario_name]
    with Path(witness_path).open("wb", buffering=0) as witness:

        def mark(kind: int, step: int) -> None:
            witness.write(np.array((kind, step, time.monotonic()), MARK).tobytes())

        mark(BORN, -1)
        print("born", flush=True)
        record(Path(run), int(first_step), scenario, mark)


def record(run: Path, first_step: int, scenario: Scenario, mark: Callable[[int, int], None]) -> None:
    """The training: no end, and no work but what the scenario asks for."""
    names = [f"w{index}" for index in range(TENSOR_COUNT)]
    with Recorder(run, quiet=True) as recorder:
        recorder.watch({name: np.ones((SIDE, SIDE), np.float32) for name in names})
        for step in itertools.count(first_step):
            with recorder.step(step) as record:
                time.sleep(scenario.seconds(step))
                gradients = {name: np.full((SIDE, SIDE), step, np.float32) for name in names}
                if step % NAN_STEPS == 0:
                    gradients[names[0]][0, 0] = np.nan
                record.add_gradients(gradients)
                record.log(loss_sum=float(step), loss_token_count=TOKEN_COUNT)
            mark(RECORDED, step)
            if step % EVENT_STEPS == 0:
                recorder.log_event(NOTE, str(step), step=step)
                mark(NOTED, step)
            if scenario.flush_steps and step % scenario.flush_steps == 0:
                mark(FLUSH_BEGUN, step)
                recorder.flush()
                mark(FLUSHED, step)


if __name__ == "__main__":
    main(sys.argv[1:])
