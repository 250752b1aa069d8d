"""Mixtures of experts: tokens are sent to the ranks that hold their experts."""

from disttensor.experts.dispatch_tokens import combine_tokens, dispatch_tokens
from disttensor.experts.expert_load import expert_load

__all__ = ["combine_tokens", "dispatch_tokens", "expert_load"]
