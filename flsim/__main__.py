"""Entry point of `python -m flsim`, which is equivalent to the command `flsim`."""

from flsim.cli import main

if __name__ == "__main__":
    main()
