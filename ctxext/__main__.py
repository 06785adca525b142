"""`python -m ctxext`, and so `accelerate launch -m ctxext eval ...`."""

from ctxext.cli import main

if __name__ == "__main__":
    main()
