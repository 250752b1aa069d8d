"""Which rank holds what: pictures of tensors, and tables of modules."""
