"""Evaluation metrics (avg@k, pass@k, maj@k) and result files."""
