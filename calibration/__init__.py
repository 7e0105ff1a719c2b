"""The calibration of the diagnoses: known faults and healthy runs, trained, diagnosed and scored.

``python -m calibration run --part judged`` trains and diagnoses, ``python -m calibration report`` writes
docs/calibration.md. It uses experiments to train and analyzer to diagnose, and is no part of the wheel.
"""
