"""``python -m quantkit``: the same as ``quantkit``."""

from quantkit.cli.main import main

main()
