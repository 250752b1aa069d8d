"""Publishing: the weights of one world, sent to the ranks of other worlds while they run."""
