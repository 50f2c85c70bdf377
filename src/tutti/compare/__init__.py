"""Explain a drop of accuracy by a ladder of runs that differ in one option each, its table and its verdict."""
