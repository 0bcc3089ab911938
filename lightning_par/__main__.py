"""`python -m lightning_par` is `lightning-par`."""

from lightning_par.cli.main import main

if __name__ == "__main__":
    main()
