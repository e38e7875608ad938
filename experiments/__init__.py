"""Configurations of runs; each file says what it is for and what it costs."""
