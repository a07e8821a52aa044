"""The log and the dumps of calls."""
