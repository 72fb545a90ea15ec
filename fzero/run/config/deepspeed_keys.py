"""The keys of a DeepSpeed config, and what becomes of each: docs/migrate.md has this table.

Ref: https://www.deepspeed.ai/docs/config-json, and deepspeed/runtime/config.py of DeepSpeed 0.19.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fzero.core.bounds import check_choice
from fzero.core.text_parsing import NAMES, nearest, short


class Values(NamedTuple):
    """The values, by name."""

    table: Mapping[str, Any]

    def read(self, name: str, kinds: tuple[type, ...], default: Any) -> Any:
        """The value, of one of these types; raises ValueError for another."""
        value = self.table.get(name, default)
        if value is not default and type(value) not in kinds:
            allowed = " or ".join(dict.fromkeys(NAMES[kind] for kind in kinds))
            raise ValueError(f"{name} is {short(value)}; it must be {allowed}")
        return value

    def number(self, name: str, default: Any = None) -> Any:
        """The value, a number."""
        return self.read(name, (float, int), default)

    def integer(self, name: str, default: Any = None) -> Any:
        """The value, a whole number (JSON's 1e3 is one)."""
        value = self.table.get(name, default)
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return self.read(name, (int,), default)

    def flag(self, name: str, default: bool = False) -> bool:
        """The value, true or false, or DeepSpeed's "true" and "false"."""
        value = self.table.get(name)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        return self.read(name, (bool,), default)

    def choice(self, name: str, among: Sequence[str], default: str, refusals: Mapping[str, str] | None = None) -> str:
        """The value, one of `among`; raises ValueError, with the reason for one of `refusals`."""
        value = self.read(name, (str,), default)
        if value in (refusals or {}):
            raise ValueError(f"{name} is {value!r}: {(refusals or {})[value]}")
        check_choice(name, value, among)
        return value

    def section(self, prefix: str) -> Values:
        """The values within a table."""
        return Values(
            {name[len(prefix) + 1 :]: value for name, value in self.table.items() if name.startswith(f"{prefix}.")}
        )

    def expect_only(self, prefix: str, kind: str, names: Sequence[str]) -> None:
        """Raise ValueError for a name that this type of `prefix` does not have, with the nearest."""
        for name in self.table:
            if name not in names:
                raise ValueError(
                    f"there is no key '{prefix}.params.{name}'{nearest(name, names)} of {kind}; it has "
                    f"{', '.join(names)}"
                )


TAKEN, IGNORED, REFUSED = "taken", "ignored", "refused"


class Key(NamedTuple):
    """A key of a DeepSpeed config. Of a refused key the values in `harmless` say what happens here anyway."""

    name: str  # dotted; "a.*" is every key in the table a, the first that matches counts
    outcome: str
    reason: str  # the key that it becomes, why it changes nothing, or what to write instead
    harmless: tuple[Any, ...] = (None, False)


def _taken(**reasons: str) -> list[Key]:
    return [Key(name.replace("__", "."), TAKEN, text) for name, text in reasons.items()]


def _ignored(reason: str, *names: str) -> list[Key]:
    return [Key(name, IGNORED, reason) for name in names]


def _refused(reason: str, *names: str, harmless: tuple[Any, ...] = (None, False)) -> list[Key]:
    return [Key(name, REFUSED, reason, harmless) for name in names]


# The arguments of optimizers and schedulers, by type.
COMMON = ("lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad", "max_grad_norm")
ADAM = (*COMMON, "torch_adam", "adam_w_mode")
LAMB = (*COMMON, "eps_inside_sqrt", "max_coeff", "min_coeff")
ONE_BIT = ("freeze_step", "eps_inside_sqrt")
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adam": ADAM,
    "adamw": ADAM,
    "lion": ("lr", "betas", "weight_decay"),
    "sgd": ("lr", "momentum", "nesterov", "weight_decay", "dampening", "maximize"),
    "lamb": LAMB,
    "onebitadam": (*COMMON, *ONE_BIT),
    "onebitlamb": (*LAMB, "freeze_step", "coeff_beta", "factor_max", "factor_min", "factor_threshold"),
    "zerooneadam": (
        *(*COMMON, "eps_inside_sqrt", "var_freeze_step", "var_update_scaler"),
        *("local_step_scaler", "local_step_clipper"),
    ),
}
OPTIMIZER_NAMES = {"onebitadam": "onebit_adam", "onebitlamb": "onebit_lamb", "zerooneadam": "zero_one_adam"}  # ours
# Arguments of optimizers of which fzero has one value: DeepSpeed's default.
FIXED: dict[str, bool | float] = {
    **dict.fromkeys(("amsgrad", "maximize", "eps_inside_sqrt"), False),
    **{"dampening": 0, "max_grad_norm": 0, "coeff_beta": 0.9, "factor_max": 4, "factor_min": 0.5},
    **{"factor_threshold": 0.1, "var_update_scaler": 16},
}
OTHER_OPTIMIZERS: dict[str, str] = {
    **dict.fromkeys(("muadam", "muadamw", "musgd"), "its rates follow from the model's widths; use by_label"),
    "muon": "DeepSpeed's goes by marks on parameters; use --set optim.name=muon, by names",
}
WARMUP = ("warmup_num_steps", "warmup_type", "last_batch_iteration")
SCHEDULERS: dict[str, tuple[str, ...]] = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", *WARMUP),
    "WarmupDecayLR": ("total_num_steps", "warmup_min_lr", "warmup_max_lr", *WARMUP),
    "WarmupCosineLR": ("total_num_steps", "warmup_min_ratio", "cos_min_ratio", *WARMUP),
    "OneCycle": (
        *("cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size"),
        *("decay_step_size", "cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate"),
        "last_batch_iteration",
    ),
}
OTHER_SCHEDULERS: dict[str, str] = {
    "LRRangeTest": "it raises the rate without end; use runs of a few rates",
}

ZERO, OFFLOAD = "zero_optimization", ("offload_optimizer", "offload_param")
BUCKETS = """
contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions
allgather_bucket_size overlap_comm sub_group_size round_robin_gradients stage3_prefetch_bucket_size
stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters
stage3_max_reuse_distance stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params
stage3_allgather_sequential stage3_partition_stream_chunk_size mics_hierarchical_params_gather
memory_efficient_linear cpu_offload_use_pin_memory
"""
TRANSFERS = """
pin_memory buffer_count buffer_size fast_init max_in_cpu pipeline pipeline_read pipeline_write super_offload
cpuadam_cores_perc
"""
NOT_ENABLED = """
elasticity autotuning eigenvalue data_efficiency hybrid_engine compression_training quantize_training
"""
# The keys of a sparse attention, by mode.
HEADS = ("block", "different_layout_per_head")
GLOBALS = ("global_block_indices", "global_block_end_indices", "attention")
SLIDING = "num_sliding_window_blocks"
SPARSE: dict[str, tuple[str, ...]] = {
    "dense": HEADS,
    "fixed": (
        *(*HEADS, "num_local_blocks", "num_global_blocks", "attention", "horizontal_global_attention"),
        "num_different_global_patterns",
    ),
    "variable": (*HEADS, "num_random_blocks", "local_window_blocks", *GLOBALS, "horizontal_global_attention"),
    "bigbird": (*HEADS, "num_random_blocks", SLIDING, "num_global_blocks", "attention"),
    "bslongformer": (*HEADS, SLIDING, *GLOBALS),
    "local_sliding_window": (*HEADS, SLIDING, "attention"),
}
# Tables of which DeepSpeed itself refuses a key that it does not know (and sparse attention, a key of which is a
# number of the model); elsewhere it does not look at one.
STRICT = (f"{ZERO}.", "optimizer.params.", "scheduler.params.", "sparse_attention.")
# What keys that several share become.
OFFLOADED = "`offload`: cpu is `host`, nvme `nvme`; `params` at stage 3"
POLICY = "`precision.policy`; without any it is `fp32`"
LENGTHS = "`data.seq_len`, `data.seq_len_warmup`: fixed_linear lengths"
LAYER_DROP = "`train.layer_drop_theta`, `layer_drop_gamma`, of gpt2 and llama"
KEYS: tuple[Key, ...] = (
    *_taken(
        train_batch_size="`train.batch`: micro-batch x accumulation x data ranks",
        train_micro_batch_size_per_gpu="`train.micro_batch`",
        gradient_accumulation_steps="`train.batch`",
        gradient_clipping="`optim.clip`; without it 0, where DeepSpeed after 0.19.2 clips at 1",
        steps_per_print="`train.log_every`",
        zero_optimization__stage="`zero`",
        zero_optimization__offload_optimizer__device=OFFLOADED,
        zero_optimization__offload_optimizer__nvme_path="`nvme.folder`",
        zero_optimization__offload_optimizer__ratio="`offload`: `opt=host:RATIO`",
        zero_optimization__offload_param__device=OFFLOADED,
        zero_optimization__offload_param__nvme_path="`nvme.folder`",
        zero_optimization__cpu_offload=OFFLOADED,
        zero_optimization__cpu_offload_param=OFFLOADED,
        bf16__enabled=POLICY,
        bfloat16__enabled=POLICY,
        fp16__enabled=POLICY,
        fp16__loss_scale="`precision.loss_scale`: 0 is dynamic, another number fixed",
        fp16__initial_scale_power="`precision.loss_scale.init`: 2 to this power",
        fp16__loss_scale_window="`precision.loss_scale.window`",
        fp16__hysteresis="`precision.loss_scale.hysteresis`",
        fp16__min_loss_scale="`precision.loss_scale.floor`",
        zero_optimization__zero_quantized_weights="`codec`: `params=int8`, at stage 3",
        zero_optimization__zero_quantized_gradients="`codec`: `grads=int4`",
        zero_optimization__zeropp_loco_param__err_beta="`codec`: `grads=int4,loco=BETA`",
        zero_optimization__zeropp_loco_param__reset_T="`codec`: `reset=T`",
        torch_autocast__enabled=POLICY,
        torch_autocast__dtype=POLICY,
        curriculum_learning__enabled=LENGTHS,
        curriculum_learning__curriculum_type=LENGTHS,
        curriculum_learning__min_difficulty=LENGTHS,
        curriculum_learning__max_difficulty=LENGTHS,
        curriculum_learning__schedule_type=LENGTHS,
        curriculum_learning__schedule_config__total_curriculum_step=LENGTHS,
        curriculum_learning__schedule_config__difficulty_step=LENGTHS,
        optimizer__type="`optim.name`: AdamW, Adam (decoupled decay unless `adam_w_mode` is false), Lion, SGD, Lamb, "
        "OneBitAdam, OneBitLamb, ZeroOneAdam",
        progressive_layer_drop__enabled=LAYER_DROP,
        progressive_layer_drop__theta=LAYER_DROP,
        progressive_layer_drop__gamma=LAYER_DROP,
        sparse_attention__mode="`model.pattern`, if one sees the same; else [block masks](models.md#block-masks)",
        scheduler__type="`optim.schedule.name`: WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle; else constant",
    ),
    *_ignored(
        "how DeepSpeed computes or sends",
        *(f"optimizer.params.{n}" for n in ("cuda_aware", "comm_backend_name", "fused", "foreach", "capturable")),
        *(f"optimizer.params.{n}" for n in ("set_grad_none", "fp32_optimizer_states")),
        *(f"scheduler.params.{n}" for n in ("cycle_first_stair_count", "cycle_second_stair_count")),
        "sparse_gradients",
        "torch_autocast.*",
    ),
    *(
        Key(f"sparse_attention.{name}", TAKEN, "its sizes; attention must be unidirectional")
        for name in dict.fromkeys(sum(SPARSE.values(), ()))
    ),
    Key("optimizer.params.*", TAKEN, "`optim.lr`, `beta1`, `weight_decay` (of all leaves), ..."),
    Key("scheduler.params.*", TAKEN, "`optim.lr`, `train.steps`, `optim.schedule.warmup_steps`, ..."),
    *_ignored(
        "fzero chooses buckets and overlap; see `--prefetch`",
        *(f"{ZERO}.{name}" for name in BUCKETS.split()),
    ),
    *_ignored(
        "transfers are fzero's own; see `--buffer-mb`",
        *(f"{ZERO}.{group}.{name}" for group in OFFLOAD for name in TRANSFERS.split()),
        "aio.*",
    ),
    *_ignored(
        "checkpoints are fzero's own",
        f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
        f"{ZERO}.stage3_gather_fp16_weights_on_model_save",
        f"{ZERO}.load_from_fp32_weights",
        f"{ZERO}.elastic_checkpoint",
        f"{ZERO}.pipeline_loading_checkpoint",
        f"{ZERO}.save_muon_momentum_buffer_in_memory",
        "checkpoint.*",
        "nebula.*",
        "datastates_ckpt.*",
    ),
    *_ignored(
        "about PyTorch modules",
        f"{ZERO}.ignore_unused_parameters",
        f"{ZERO}.override_module_apply",
        f"{ZERO}.legacy_stage1",
        f"{ZERO}.leaf_module.*",
        f"{ZERO}.log_trace_cache_warnings",
        f"{ZERO}.enable_sanity_checks",
        "optimizer.legacy_fusion",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "fp16.auto_cast",
        "fp16.fused_mode",
        "bf16.immediate_grad_update",
        "bf16.check_grad_overflow",
        "compile.*",
        "disable_allgather",
        "graph_harvesting",
        "vocabulary_size",
        "dataloader_drop_last",
        "use_data_before_expert_parallelism",
    ),
    *_ignored("divided once, in float32", "prescale_gradients", "gradient_predivide_factor"),
    *_ignored(
        "use `--remat`, `--offload acts=host` and `--set partition_activations=true`", "activation_checkpointing.*"
    ),
    *_ignored(
        "`fzero report`, `--profile` and `train.loggers` show a run",
        "flops_profiler.*",
        "comms_logger.*",
        "tensorboard.*",
        "wandb.*",
        "csv_monitor.*",
        "comet.*",
        "monitor_config.*",
        "timers.*",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
    ),
    *_ignored(
        "float32 here; see `optim.states=bf16`",
        "communication_data_type",
        "seq_parallel_communication_data_type",
        "data_types.grad_accum_dtype",
        "fp16.fp16_master_weights_and_grads",
        "bf16.bf16_master_weights_and_grads",
        "bf16.bf16_optimizer_states",
    ),
    *_refused("hysteresis comes back when the scale rises", "fp16.consecutive_hysteresis"),
    *_refused("use models.quantized", f"{ZERO}.zero_quantized_nontrainable_weights"),
    *_refused(
        "use --mesh dp=N,rp=M --codec hpz, where dp is this number",
        f"{ZERO}.zero_hpz_partition_size",
        harmless=(None, 1),
    ),
    *_refused("use --mesh dp=N,rp=M, which shards over dp", f"{ZERO}.mics_shard_size", harmless=(None, 1, -1)),
    *_refused("no part of an update is made later than the rest", f"{ZERO}.zenflow.*"),
    *_refused("use --mesh tp=N", "tensor_parallel.*", "autotp_size", harmless=(None, False, 0, 1)),
    *_refused("use --mesh cp=N --context ulysses", "sequence_parallel_size", harmless=(None, False, 0, 1)),
    *_ignored("dp is the ranks that other axes leave", "data_parallel_size"),
    *_refused("use --mesh pp=N", "pipeline.stages", harmless=(None, False, 0, 1)),
    *_ignored("see --mesh pp=N", "pipeline.*"),
    *_refused("use bf16 or fp16", "amp.enabled"),
    *_ignored("their table is not enabled", "amp.*"),
    *_refused("give the batch that it would choose", "elasticity.enabled"),
    *_refused("use `fzero plan --search`", "autotuning.enabled"),
    *_ignored(
        "its tables count where enabled",
        *(f"data_efficiency.{name}enabled" for name in ("", "data_sampling.", "data_routing.")),
    ),
    *_refused("use data.curriculum", "data_efficiency.data_sampling.curriculum_learning.enabled"),
    *_refused(
        "use data.packing=buckets with optim.lr_scaling", "data_efficiency.data_sampling.dynamic_batching.enabled"
    ),
    *_refused("use train.random_ltd", "data_efficiency.data_routing.random_ltd.enabled"),
    *_refused(
        "fzero has no such training",
        "eigenvalue.enabled",
        "hybrid_engine.enabled",
        "compression_training.*enabled",
        "quantize_training.enabled",
    ),
    *_ignored(
        "their table is not enabled",
        *(f"{name}.*" for name in NOT_ENABLED.split()),
    ),
)


def markdown() -> str:
    """The tables of docs/migrate.md.

    >>> print(markdown().splitlines()[2])
    | `train_batch_size` | `train.batch`: micro-batch x accumulation x data ranks |
    """
    tables = []
    for outcome, reason in ((TAKEN, "becomes"), (IGNORED, "why"), (REFUSED, "instead")):
        rows: dict[str, list[str]] = {}
        for key in KEYS:
            if key.outcome == outcome:
                rows.setdefault(key.reason, []).append(key.name)
        lines = [f"| {', '.join(f'`{name}`' for name in _listed(names))} | {text} |" for text, names in rows.items()]
        tables.append("\n".join([f"| {outcome} | {reason} |", "|---|---|", *lines]) + "\n")
    return "\n".join(tables)


def _listed(names: list[str]) -> list[str]:
    """The names, those of both tables of offload once, and those of sparse attention as their table."""
    both = {name for name in names if "offload_" in name and {_of(name, one) for one in OFFLOAD} <= set(names)}
    short = [_of(name, "offload_*") if name in both else name for name in names]
    if len(names) > 1:
        short = ["sparse_attention.*" if name.startswith("sparse_attention.") else name for name in short]
    return list(dict.fromkeys(short))


def _of(name: str, table: str) -> str:
    """The name in another table of offload."""
    return re.sub(r"offload_(optimizer|param)(?=\.)", table, name)
