"""`mlagen replay`: the call of a dump, from its arguments and the contents of its tensors."""
