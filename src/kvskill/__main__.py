"""`python -m kvskill`."""

from kvskill.cli import main

main()
