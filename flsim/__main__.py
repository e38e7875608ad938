"""`python -m flsim` is `flsim`."""

from flsim.cli import main

if __name__ == "__main__":
    main()
