"""`mlagen bench` below its options: cases, measuring them on a GPU, and what is said of them."""
