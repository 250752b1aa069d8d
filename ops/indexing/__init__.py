"""Rules. Functions that pick or write elements by index."""

from ops.indexing import gather, getitem, index, scatter, vocab_shard

__all__ = ["gather", "getitem", "index", "scatter", "vocab_shard"]
