"""Configurations of runs; each file states its purpose and its cost."""
