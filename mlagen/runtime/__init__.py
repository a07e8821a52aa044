"""Kernel runtime: loading cubins, launching, tensor maps, semaphores."""
