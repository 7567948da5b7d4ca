"""Causal attention inside packed documents, and over a key-value cache."""
