"""Reasoning RL with MGPO (VibeThinker-3B report, section 2.2).

vibethinker train --config configs/math_rl.py --workdir DIR --config.model.checkpoint=SFT_DIR \
    --config.data.path=PROBLEMS
Long2Short is the same stage with --config.mgpo.long2short=0.2, from the checkpoint that Math RL ends with.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "stage": "mgpo",
            "seed": 0,
            "steps": 400,  # chosen: the report gives no number
            "prompts_per_step": 128,  # chosen: DeepScaleR, POLARIS (128 prompts x 8 samples)
            "sequence_length": 65536,  # report: one 64K window throughout; a prompt and its response fit in a row
            "micro_batch_rows": 0,  # rows of one forward and backward pass, over all devices; 0: one per data shard
            "max_segments": 64,  # chosen: most responses per row
            "remat": "block",  # chosen: recompute everything but attention; none, block, full or offload
            "model": {
                "checkpoint": "",  # Hugging Face directory, Orbax checkpoint or work directory of an earlier stage
                "architecture": "models/qwen2.5-coder-3b.json",  # what `vibethinker plan` assumes without a checkpoint
                "initialise": "checkpoint",
                "max_position_embeddings": 65536,  # report: one 64K window throughout
                "compute_dtype": "bfloat16",  # chosen
                "head_chunk": 1024,  # chosen
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
            "data": {"path": ""},  # problems with verifiers: our records, or a format of data/sources.py
            "rollout": {
                "samples": 8,  # G, chosen: as prompts_per_step
                "temperature": 1.0,  # chosen: as the report's evaluation; the trainer's log-probabilities use it too
                "max_new_tokens": 61440,  # chosen: the window less 4,096 for prompts
                "max_slots": 64,  # chosen: sequences decoded at once
            },
            "verifier": {
                "workers": 4,  # chosen: processes per host
                "timeout_s": 5.0,  # chosen: CPU seconds per verdict
                "require_thinking": True,  # chosen: only what follows </think> counts, and it must be there
            },
            "mgpo": {
                "gamma": 1.0,  # chosen: the report gives none; 0 is GRPO
                "clip_low": 0.2,  # chosen: PPO's epsilon, symmetric as in eq. 3
                "clip_high": 0.2,
                "updates_per_batch": 1,  # report: all RL is on-policy
                "aggregation": "sequence_mean",  # report, eq. 3; or "token_mean"
                "mask_truncated": False,  # chosen: a truncated response is judged as it stands, and trained on
                "only_with_signal": False,  # True: groups without any advantage skip the update
                "long2short": 0.0,  # report, section 2.2.2: 0.2 in the Long2Short phase
                "normalise_by": "shaped_std",  # the report's literal reading; or "binary_std", "none"
                "tis_cap": 2.0,  # report's reference Yao et al.; 2 as in verl and slime. 0 turns it off
                "token_band": (),  # optional filters (objectives/importance.py): (), or (low, high)
                "geometric_band": (),
                "k3_limit": 0.0,  # 0 turns it off
                "veto": 0.0,
            },
            "optimizer": {
                "peak": 1e-6,  # chosen: DAPO, DeepScaleR, POLARIS, Skywork-OR1 all use it, constant
                "floor": 1e-6,
                "warmup_fraction": 0.0,
                "b1": 0.9,
                "b2": 0.95,
                "eps": 1e-8,
                "weight_decay": 0.0,  # chosen
                "clip_norm": 1.0,
                "moment_dtype": "float32",  # of Adam's first moment; bfloat16 saves 2 bytes per parameter
                "offload": False,  # keep the moments in host memory between steps
            },
            "loop": {"save_every": 10, "keep": 3},  # chosen
        }
    )
