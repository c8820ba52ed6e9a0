"""Find out which rule an optimizer follows (`diagnose`), and test that it does not change (`record` and `check`)."""

from arrayopt.testing.diagnosis.diagnosis import Diagnosis
from arrayopt.testing.diagnosis.entry import check, diagnose, record
from arrayopt.testing.diagnosis.trajectory import Trajectory

__all__ = ["Diagnosis", "Trajectory", "check", "diagnose", "record"]
