"""The policy on Megatron-Core: parallel set-up, model, packed passes, optimizer."""
