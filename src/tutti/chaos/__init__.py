"""Inject faults into runs from outside, without their cooperation, and check that the runs survive as promised."""
