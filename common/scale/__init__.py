"""What large models need: the head in blocks, vLLM, experts, gradient norms in one pass."""
