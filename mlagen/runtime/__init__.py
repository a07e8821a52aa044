"""Kernel runtime: loading cubins, planning grids, launching."""
