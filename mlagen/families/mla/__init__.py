"""The MLA families."""
