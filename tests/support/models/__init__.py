"""Models that others wrote, tiny, with the batch and the loss that they are tried with."""
