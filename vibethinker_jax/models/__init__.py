"""The Qwen2 decoder: its configuration, parameters, forward pass and the loaded policy."""
