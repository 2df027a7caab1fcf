"""RL post-training of LLMs: Megatron-Core policies, vLLM rollouts, KL-regularised policy gradients."""

__version__ = "0.1.0"
