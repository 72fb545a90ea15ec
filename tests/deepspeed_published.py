"""DeepSpeed configs with keys and values that people publish, each of a kind.

name -> (config, data ranks, why it is refused or None).
"""

AUTO = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
    "gradient_clipping": "auto",
}
AUTO_ADAMW = {
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    },
}
AUTO_HALF = {
    "fp16": {
        **{"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
        **{"hysteresis": 2, "min_loss_scale": 1},
    },
    "bf16": {"enabled": "auto"},
}
STAGE_2 = {
    **{"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 2e8, "overlap_comm": True},
    **{"reduce_scatter": True, "reduce_bucket_size": 2e8, "contiguous_gradients": True},
}
CPU, NVME = {"device": "cpu", "pin_memory": True}, {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True}
STAGE_3 = {
    **{"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9},
    **{"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    **{"stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9},
    **{"stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True},
}
BY_FIELD = {
    **{"stage": 3, "offload_optimizer": CPU, "offload_param": CPU, "prefetch_bucket_size": 5e7},
    **{"param_persistence_threshold": 1e5, "model_persistence_threshold": 1e10, "max_live_parameters": 1e9},
    **{"max_reuse_distance": 1e9, "gather_16bit_weights_on_model_save": True, "round_robin_gradients": True},
    **{"module_granularity_threshold": 0, "use_all_reduce_for_fetch_params": False},
}
BERT = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 16, "steps_per_print": 100}
BERT |= {"prescale_gradients": False, "gradient_clipping": 1.0, "wall_clock_breakdown": False}
BERT |= {"fp16": {"enabled": True, "loss_scale": 0}}
CYCLE = {
    **{"cycle_first_step_size": 1000, "cycle_first_stair_count": 500, "cycle_second_step_size": 1000},
    **{"cycle_second_stair_count": 500, "decay_step_size": 1000, "cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3},
    **{"decay_lr_rate": 0.001, "cycle_min_mom": 0.85, "cycle_max_mom": 0.99, "decay_mom_rate": 0.0},
}
COURSE = {
    **{"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 64},
    **{"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 1500, "difficulty_step": 8}},
}
ADAM_8_BIT_ERA = {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
WARM = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 1000}}


def adam(**params):
    return {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, **params}}}


def of(kind, **params):
    return {"optimizer": {"type": kind, "params": {"lr": 1e-3, "weight_decay": 0.01, **params}}}


PUBLISHED = {
    "trainer stage 2": ({**AUTO, **AUTO_ADAMW, **AUTO_HALF, "zero_optimization": STAGE_2}, 1, None),
    "trainer stage 2 offload": (
        {**AUTO, **AUTO_ADAMW, **AUTO_HALF, "zero_optimization": {**STAGE_2, "offload_optimizer": CPU}},
        *(1, None),
    ),
    "trainer stage 3 offload": (
        {
            **{**AUTO, **AUTO_ADAMW, **AUTO_HALF, "steps_per_print": 2000, "wall_clock_breakdown": False},
            "zero_optimization": {**STAGE_3, "offload_optimizer": CPU, "offload_param": CPU},
        },
        *(1, None),
    ),
    "fine-tuning stage 0": (
        {
            **{**AUTO, **AUTO_HALF, "zero_allow_untested_optimizer": True},
            "zero_optimization": {**STAGE_2, "stage": 0, "round_robin_gradients": True},
        },
        *(1, None),
    ),
    "fine-tuning stage 3": (
        {**AUTO, **AUTO_HALF, "zero_allow_untested_optimizer": True, "zero_optimization": STAGE_3},
        *(1, None),
    ),
    "bf16 with the keys of fp16": (
        {
            **{**AUTO, **adam(), "zero_optimization": STAGE_2},
            "bf16": {"enabled": True, "auto_cast": False, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
        },
        *(1, None),
    ),
    "fields by name": ({**AUTO, "bf16": {"enabled": True}, "zero_optimization": BY_FIELD}, 1, None),
    "offload_param at stage 2": (
        {
            **{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0},
            **{"fp16": {"enabled": True, "auto_cast": False}, "zero_force_ds_cpu_optimizer": False},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "offload_param": CPU},
        },
        *(2, None),
    ),
    "nvme": (
        {
            **{**AUTO, **adam(betas=[0.9, 0.95]), "bf16": {"enabled": True}},
            **{"aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {**NVME, "buffer_count": 4, "fast_init": False},
                "offload_param": {**NVME, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
            },
        },
        *(1, None),
    ),
    "cifar": (
        {
            **{"train_batch_size": 16, "steps_per_print": 2000, "optimizer": ADAM_8_BIT_ERA, "scheduler": WARM},
            **{"gradient_clipping": 1.0, "prescale_gradients": False, "wall_clock_breakdown": False},
            **{"bf16": {"enabled": False}, "zero_optimization": {**STAGE_2, "stage": 0, "cpu_offload": False}},
            "fp16": {"enabled": True, "fp16_master_weights_and_grads": False, "loss_scale": 0, "min_loss_scale": 15},
        },
        *(2, None),
    ),
    "cifar, experts": (
        {
            **{"train_batch_size": 16, "optimizer": ADAM_8_BIT_ERA},
            **{"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
            "zero_optimization": {**STAGE_2, "cpu_offload": True},
        },
        *(2, None),
    ),
    "bert, lamb": ({**BERT, **of("Lamb", bias_correction=False, max_coeff=0.3, min_coeff=0.01)}, 4, None),
    "lamb with its defaults": ({"train_micro_batch_size_per_gpu": 2, **of("Lamb", eps=1e-8)}, 2, None),
    "bert, 1-bit adam": (
        {
            **{
                **BERT,
                "optimizer": {"type": "OneBitAdam", "params": {"lr": 4e-4, "freeze_step": 23, "cuda_aware": False}},
            },
        },
        *(4, None),
    ),
    "bert, 1-bit lamb": (
        {
            **BERT,
            **of("OneBitLamb", bias_correction=False, max_coeff=0.3, min_coeff=0.01, freeze_step=40, cuda_aware=False),
        },
        *(4, None),
    ),
    "bert, 0/1 adam": (
        {
            **BERT,
            **of(
                **{"kind": "ZeroOneAdam", "bias_correction": False, "var_freeze_step": 15, "var_update_scaler": 16},
                **{"local_step_scaler": 20, "local_step_clipper": 16, "comm_backend_name": "nccl"},
            ),
        },
        *(4, None),
    ),
    "gpt, cycle and course": (
        {
            **{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0},
            **{"optimizer": {"type": "Adam", "params": {"lr": 1.5e-4, "betas": [0.9, 0.95]}}},
            **{"scheduler": {"type": "OneCycle", "params": CYCLE}, "zero_optimization": {**STAGE_2, "stage": 1}},
            **{"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True, "profile": True}},
            **{"aio": {"thread_count": 8, "single_submit": True}, "curriculum_learning": COURSE},
            "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500},
        },
        *(8, None),
    ),
    "cycle of a rate alone": (
        {
            **{"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
            "scheduler": {"type": "OneCycle", "params": {**CYCLE, "cycle_momentum": True}},
        },
        *(1, None),
    ),
    "a scheduler by another name": (
        {
            **{"train_batch_size": 12, "gradient_accumulation_steps": 3, **adam()},
            **{"lr_scheduler": {"type": "OneCycle", "params": {"max_lr": 3e-5, "pct_start": 0.3}}},
            **{"use_lr_scheduler": True, "zero_optimization": {"stage": 1}, "fp16": {"enabled": False}},
        },
        *(1, None),
    ),
    "keys of a launcher": (
        {
            **{"launcher": "openmpi", "deepspeed_mpi": True, "train_micro_batch_size_per_gpu": 4},
            **{**adam(betas=[0.9, 0.95]), "zero_optimization": {**STAGE_3, "reduce_bucket_size": 5e8}},
        },
        *(2, None),
    ),
    "rate limits alike": (
        {
            **{"train_batch_size": 8, **adam()},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 3e-5, "warmup_max_lr": 3e-5}},
        },
        *(1, None),
    ),
    "warmup with a decay": (
        {
            **{"train_batch_size": 256, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4},
            **adam(betas=[0.9, 0.95], weight_decay=0.1),
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    **{"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 20, "total_num_steps": 1000},
                    "last_batch_iteration": -1,
                },
            },
            **{"bf16": {"enabled": True}, "zero_optimization": STAGE_3, "wall_clock_breakdown": True},
        },
        *(8, None),
    ),
    "all in bf16": (
        {
            **{"train_micro_batch_size_per_gpu": 2, "steps_per_print": 1, **of("Adam")},
            **{"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
            **{"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}, "zero_optimization": {"stage": 3}},
            **{"data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "bfp16"},
        },
        *(2, None),
    ),
    "quantized": (
        {
            **{"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, **adam()},
            "zero_optimization": {
                **{"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True},
                **{"zero_hpz_partition_size": 1, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}},
            },
        },
        *(4, None),
    ),
    "the first form": (
        {"train_batch_size": 8, **of("Adam"), "zero_optimization": True, "fp16": {"enabled": "true"}, "amp": None},
        *(1, None),
    ),
    "chat, tables that are off": (
        {
            **{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0},
            **{"prescale_gradients": False, "wall_clock_breakdown": False, "zero_optimization": {**BY_FIELD}},
            "hybrid_engine": {
                "enabled": False,
                "max_out_tokens": 512,
                "inference_tp_size": 1,
                "release_inference_cache": False,
            },
            "tensorboard": {"enabled": False, "output_path": "step1/ds_tensorboard_logs/", "job_name": "step1"},
            "compression_training": {
                "weight_quantization": {"shared_parameters": {"enabled": False, "schedule_offset": 0}}
            },
            "flops_profiler": {"enabled": False, "profile_step": 1, "detailed": True},
        },
        *(2, None),
    ),
    "sparse attention": (
        {**AUTO, **AUTO_ADAMW, "sparse_attention": {"mode": "fixed", "block": 16}},
        *(1, "sparse_attention.attention is 'bidirectional', and a decoder does not look ahead"),
    ),
    "compression": (
        {
            **of("Adam"),
            "compression_training": {
                "weight_quantization": {"shared_parameters": {"enabled": True, "rounding": "nearest"}}
            },
        },
        *(1, "compression_training.weight_quantization.shared_parameters.enabled is True: fzero has no such training"),
    ),
    "apex": ({**AUTO, "amp": {"enabled": True, "opt_level": "O1"}}, 1, "amp.enabled is True: use bf16 or fp16"),
    "secondary shards": (
        {**adam(), "zero_optimization": {"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 8}},
        *(16, "zero_hpz_partition_size is 8: use --mesh dp=N,rp=M"),
    ),
    "stages of a pipeline": (
        {**adam(), "pipeline": {"stages": 2, "partition": "best", "activation_checkpoint_interval": 0}},
        *(2, "pipeline.stages is 2: use --mesh pp=N"),
    ),
    "a range test": (
        {**adam(), "scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-3}}},
        *(1, "LRRangeTest': it raises the rate without end"),
    ),
    "an optimizer of torch": (
        {"optimizer": {"type": "RMSprop", "params": {"lr": 1e-3}}},
        *(1, r"optim.from_torch\(torch.optim.RMSprop\)"),
    ),
    "its own generation": ({**AUTO, "hybrid_engine": {"enabled": True}}, 1, "hybrid_engine.enabled is True"),
    "elastic": (
        {"elasticity": {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4]}},
        *(1, "elasticity.enabled is True: give the batch that it would choose"),
    ),
}
