"""Other platforms, as their own users would run them on our model: what `flsim bench training` compares with.

Each is a program, `python -m flsim.bench.peers NAME WORK RESULT CORES`, which reads and writes files of `work`: so it
can run in an environment of its own, which needs nothing of ours but `flsim.models`, that is numpy and torch.
"""
