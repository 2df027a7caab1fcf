"""From graded responses to the numbers of an evaluation."""
