"""Specs of the GQA families."""
