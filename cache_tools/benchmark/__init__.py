"""Implementation of `mlagen bench`: cases, measurements on a GPU, and reports."""
