"""Supervised fine-tuning of Qwen2.5-Coder-3B (VibeThinker-3B report, section 2.1.2, stage 1).

vibethinker train --config configs/sft.py --workdir DIR --config.model.checkpoint=HF_DIR --config.data.path=TRACES.jsonl
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "stage": "sft",
            "seed": 0,
            "model": {
                "checkpoint": "",  # Hugging Face directory, Orbax checkpoint or work directory of an earlier stage
                "initialise": "checkpoint",  # or "random": `checkpoint` then needs only config.json and the tokenizer
                "max_position_embeddings": 65536,  # report: one 64K window; the base declares 32,768. 0 keeps its own
                "compute_dtype": "bfloat16",  # chosen: float32 master weights, bfloat16 activations
                "remat": "full",  # chosen: recompute each layer in the backward pass
                "head_chunk": 1024,  # chosen: tokens per row whose logits exist at once
            },
            "mesh": {"replica": 1, "fsdp": -1, "context": 1, "tensor": 1, "devices": 0},  # devices 0: all
            "data": {
                "path": "",  # JSONL or Parquet of examples: problem fields, trace_id, response
                "row_length": 65536,  # chosen: the report gives no SFT length; it is the RL window
                "rows_per_batch": 128,  # report: global batch 128; its unit is not given, rows is chosen
                "rows_per_micro_batch": 16,  # chosen: what fits at once, over all devices
                "max_segments": 256,  # chosen: most documents per row
                "epochs": 5,  # report, stage 1 (stage 2: 2)
            },
            "optimizer": {
                "peak": 5e-5,  # report
                "floor": 8e-8,  # report
                "warmup_fraction": 0.05,  # report
                "b1": 0.9,  # not given; AdamW's usual setting for language models
                "b2": 0.95,  # not given; as b1
                "eps": 1e-8,  # not given
                "weight_decay": 0.1,  # not given; as b1, not on norms and biases
                "clip_norm": 1.0,  # not given; as b1
            },
            "loop": {"save_every": 100, "keep": 3},  # chosen
        }
    )
