"""Grouped-query attention: the entry points of ``flashinfer.decode``, besides XQA's."""
