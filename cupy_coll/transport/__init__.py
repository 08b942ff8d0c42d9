"""How tensors and objects travel between the members of a group."""
