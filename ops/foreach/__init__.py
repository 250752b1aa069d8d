"""Rules. Functions on lists of tensors: ``torch._foreach_*`` and the fused optimizers."""

from ops.foreach import foreach, foreach_reduce, fused_optim

__all__ = ["foreach", "foreach_reduce", "fused_optim"]
