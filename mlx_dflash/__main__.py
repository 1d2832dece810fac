"""``python -m mlx_dflash``: the command line."""

from .cli.entry import main

if __name__ == "__main__":
    raise SystemExit(main())
