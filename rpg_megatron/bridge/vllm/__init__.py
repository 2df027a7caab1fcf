"""The part of the bridge that runs inside vLLM's workers."""
