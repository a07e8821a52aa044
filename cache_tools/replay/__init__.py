"""`mlagen replay`: the call of a dump, rebuilt from its metadata or its tensors."""
