"""Faults made on purpose, from outside, in runs that know nothing of it; and whether those survive as promised."""
