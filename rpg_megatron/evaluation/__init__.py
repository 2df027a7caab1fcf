"""avg@k, pass@k and maj@k from graded responses."""
