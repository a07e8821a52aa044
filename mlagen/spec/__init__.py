"""What a kernel is: pure data that imports neither torch nor cuda."""
