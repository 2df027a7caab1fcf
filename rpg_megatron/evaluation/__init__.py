"""Evaluation metrics (avg@k, pass@k, maj@k) from graded responses, and result files."""
