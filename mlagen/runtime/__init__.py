"""Cubin to work on a stream: loading, planning, launching."""
