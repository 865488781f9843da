"""DeepSeek-V4.1-Flash decode in JAX: the model, its caches and its jitted step."""
