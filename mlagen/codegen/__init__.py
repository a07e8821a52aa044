"""Spec to source: the templates and the one Jinja environment that renders them."""
