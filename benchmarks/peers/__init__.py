"""Other platforms as their own users run them on our model, for comparison in `python -m benchmarks training`.

Each is a program, `python -m benchmarks.peers NAME WORK RESULT CORES`, which reads and writes files of `work`. It can
therefore run in an environment of its own, which needs only `flsim.models` of flsim, with numpy and torch.
"""
