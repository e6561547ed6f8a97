"""``python -m dpvim``."""

from dpvim.cli import app

app(prog_name="dpvim")
