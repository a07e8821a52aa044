"""Kernel families on the host: checks, selection, plan and launch of a decode call."""
