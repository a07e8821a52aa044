"""What the commands do, apart from their options and output."""
