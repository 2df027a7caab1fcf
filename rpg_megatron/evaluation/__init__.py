"""Evaluation metrics avg@k, pass@k and maj@k, and result files."""
