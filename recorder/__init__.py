"""Flight recorder for training loops: hooks that append columnar records to Arrow IPC streams."""

from recorder.cadence import Cadence
from recorder.errors import RecorderError
from recorder.manifest import LabelRoles, Manifest, ReferenceLosses
from recorder.recorder import Recorder
from recorder.statistics import combined_hash, content_hash
from recorder.step_record import EvaluationLosses, StepRecord

__all__ = [
    "Cadence",
    "EvaluationLosses",
    "LabelRoles",
    "Manifest",
    "Recorder",
    "RecorderError",
    "ReferenceLosses",
    "StepRecord",
    "combined_hash",
    "content_hash",
]
