"""Specs of the MLA families."""
