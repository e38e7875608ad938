"""Exact tests, curves of an attacker's success, and lower bounds on epsilon: the proofs in a run.

All functions here are of numbers alone, in numpy and scipy. Scores are larger for what an attacker takes for a member.
"""
