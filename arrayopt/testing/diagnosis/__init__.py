"""What does this optimizer compute? See `diagnose`, and `record` and `check` for tests of it."""

from arrayopt.testing.diagnosis.diagnosis import Diagnosis
from arrayopt.testing.diagnosis.entry import check, diagnose, record
from arrayopt.testing.diagnosis.trajectory import Trajectory

__all__ = ["Diagnosis", "Trajectory", "check", "diagnose", "record"]
