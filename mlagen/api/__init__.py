"""Shared parts of the entry points: argument checks, call caches, launchers, the CPU backend."""
