"""Runs written to other tools' stores, from the log. One file per tool."""
