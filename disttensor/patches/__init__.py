"""Every change that disttensor makes to torch.

Not here: anything that works without a change to torch.
"""
