"""`python -m g2rpo` is `g2rpo`."""

from g2rpo.cli.main import main

if __name__ == "__main__":
    main()
