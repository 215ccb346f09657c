"""`python -m irpe` is the program `irpe`."""

from irpe.cli.main import main

main()
