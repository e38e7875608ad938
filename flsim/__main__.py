"""Entry point of `python -m flsim`, which does the same as the command `flsim`."""

from flsim.cli import main

if __name__ == "__main__":
    main()
