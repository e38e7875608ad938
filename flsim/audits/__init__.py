"""What a run proves about its privacy: exact tests, curves of an attacker's success, and lower bounds on epsilon.

All functions here are of numbers alone, in numpy and scipy. Scores are larger for what an attacker takes for a member.
"""
