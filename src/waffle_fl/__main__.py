"""python -m waffle_fl is the `waffle` command."""

from waffle_fl.cli import main

main()
