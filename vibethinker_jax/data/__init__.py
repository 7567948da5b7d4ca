"""Data: records and the formats they come in, the tokenizer, row packing and the loader."""
