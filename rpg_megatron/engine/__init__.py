"""A vLLM server as a process, and its HTTP client."""
