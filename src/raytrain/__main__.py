"""``python -m raytrain``."""

from raytrain.cli import main

main()
