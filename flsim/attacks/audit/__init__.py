"""Exact tests, curves of the success of attackers, and lower bounds on epsilon.

Most functions are functions of numbers, with numpy and scipy. Larger scores mean membership.
"""
