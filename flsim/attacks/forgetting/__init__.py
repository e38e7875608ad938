"""Forgetting: the time after its last use in which a canary is distinguishable from a canary that was never planted.

Jagielski et al. (2022), "Measuring Forgetting of Memorized Training Examples", sections 3 and 4. A step in the paper is
a round in flsim. The paper's two models are two runs of one seed, the arms IN and OUT.
"""
