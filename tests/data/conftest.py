"""Hypothesis without deadlines: on a machine that others use too, a test's time says little about the test."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
