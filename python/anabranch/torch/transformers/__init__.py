"""Hugging Face Transformers: the experts of its models, computed by `routed_experts`.

After `register()` every model whose experts follow the interface of Transformers accepts
`experts_implementation="anabranch"`. Its parameters and its router do not change.
"""

from anabranch.torch.transformers.adapter import NAME, Experts, check, load_balancing_loss_func, register

__all__ = ["NAME", "Experts", "check", "load_balancing_loss_func", "register"]
