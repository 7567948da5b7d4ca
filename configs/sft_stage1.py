"""Supervised fine-tuning of Qwen2.5-Coder-3B (VibeThinker-3B report, section 2.1.2, stage 1).

vibethinker train --config configs/sft_stage1.py --workdir DIR --config.model.checkpoint=HF_DIR \
    --config.data.path=TRACES.jsonl
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "stage": "sft",
            "seed": 0,
            "sequence_length": 65536,  # chosen: tokens of a packed row, as in RL; the report gives no SFT length
            "global_batch_rows": 128,  # report: global batch 128; its unit is not given, rows is chosen
            "micro_batch_rows": 0,  # rows of one forward and backward pass, over all devices; 0: one per data shard
            "max_segments": 256,  # chosen: most documents per row
            "remat": "block",  # chosen: recompute everything but attention; none, block, full or offload
            "model": {
                "checkpoint": "",  # Hugging Face directory, Orbax checkpoint or work directory of an earlier stage
                "architecture": "models/qwen2.5-coder-3b.json",  # what `vibethinker plan` assumes without a checkpoint
                "initialise": "checkpoint",  # or "random": `checkpoint` then needs only config.json and the tokenizer
                "max_position_embeddings": 65536,  # report: one 64K window; the base declares 32,768. 0 keeps its own
                "compute_dtype": "bfloat16",  # chosen: float32 master weights, bfloat16 activations
                "head_chunk": 1024,  # chosen: tokens per row whose logits exist at once
                "mlp_chunks": 2,  # chosen: parts of the MLP computed one after another, for memory
            },
            "attention": {
                "backend": "auto",  # dense, blockwise or pallas; auto: pallas on TPU
                "strategy": "auto",  # how a sharded sequence attends: gather or ring
                "layout": "zigzag",  # order of a sharded row: zigzag gives every device the same work; or contiguous
                "block_q": 0,  # queries and keys per block; 0: the backend's own
                "block_kv": 0,
            },
            "mesh": {"replica": 1, "fsdp": 1, "context": -1, "tensor": 1, "devices": 0},  # devices 0: all
            "data": {
                "path": "",  # JSONL or Parquet of examples: problem fields, trace_id, response
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
                "moment_dtype": "float32",  # of Adam's first moment; bfloat16 saves 2 bytes per parameter
                "offload": False,  # keep the moments in host memory between steps
            },
            "loop": {"save_every": 100, "keep": 3},  # chosen
        }
    )
