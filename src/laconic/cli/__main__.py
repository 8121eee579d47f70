"""`python -m laconic.cli`."""

from laconic.cli import main

if __name__ == "__main__":
    main()
