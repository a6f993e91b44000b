"""Builds the tiny models of the package's testbed from nothing (`python -m tools.testbed`)."""
