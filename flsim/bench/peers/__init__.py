"""Other platforms as their own users run them on our model, for comparison in `flsim bench training`.

Each is a program, `python -m flsim.bench.peers NAME WORK RESULT CORES`, which reads and writes files of `work`. It can
therefore run in an environment of its own, which needs only `flsim.models` of flsim, with numpy and torch.
"""
