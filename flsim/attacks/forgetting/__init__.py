"""Forgetting: how long after its last use a canary can still be told from one that was never planted.

Jagielski et al. (2022), "Measuring Forgetting of Memorized Training Examples", sections 3 and 4. A step of the paper is
a round here. The paper's two models are two runs of one seed, the arms IN and OUT.
"""
