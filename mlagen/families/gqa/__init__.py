"""The GQA families."""
