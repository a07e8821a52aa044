"""Plans of paged attention and their runs, for the wrappers of MLA and of batch decode."""
