"""The keys of a DeepSpeed config, and what becomes of each: docs/migrate.md has this table.

Ref: https://www.deepspeed.ai/docs/config-json, and deepspeed/runtime/config.py of DeepSpeed 0.19.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fzero.core.config_tables import check_choice
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

    def integer(self, name: str, default: Any = None, minimum: float = -math.inf) -> Any:
        """The value, a whole number (JSON's 1e3 is one) of at least `minimum`."""
        value = self.table.get(name, default)
        value = int(value) if isinstance(value, float) and value.is_integer() else self.read(name, (int,), default)
        if value is not None and value < minimum:
            raise ValueError(f"{name} is {value}; it must be at least {minimum}")
        return value

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

    def expect_only(self, table: str, kind: str, names: Sequence[str]) -> None:
        """Raise ValueError for a name that the table does not have where it is of this kind, with the nearest."""
        for name in self.table:
            if name not in names:
                raise ValueError(
                    f"there is no key '{table}.{name}'{nearest(name, names)} of {kind}; it has {', '.join(names)}"
                )


TAKEN, IGNORED, REFUSED = "taken", "ignored", "refused"


class Key(NamedTuple):
    """A key of a DeepSpeed config; `harmless`: values of a refused one that pass."""

    name: str  # dotted; "a.*" is every key in the table a, the longest that matches counts
    outcome: str
    reason: str  # the key that it becomes, why it changes nothing, or what to write instead
    harmless: tuple[Any, ...] = (None, False)


def within(table: str, names: str) -> str:
    """The names of keys in a table, with its name.

    >>> within("aio", "block_size queue_depth")
    'aio.block_size aio.queue_depth'
    """
    return " ".join(f"{table}.{name}" for name in names.split())


def split_names(rows: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Rows of names, each row in one text, as tuples."""
    return {kind: tuple(names.split()) for kind, names in rows.items()}


# The arguments of optimizers and schedulers, by type.
COMMON = "lr betas eps weight_decay bias_correction amsgrad max_grad_norm"
ADAM = f"{COMMON} torch_adam adam_w_mode"
LAMB = f"{COMMON} eps_inside_sqrt max_coeff min_coeff"
OPTIMIZERS = split_names(
    {
        "adam": ADAM,
        "adamw": ADAM,
        "lion": "lr betas weight_decay",
        "sgd": "lr momentum nesterov weight_decay dampening maximize",
        "lamb": LAMB,
        "onebitadam": f"{COMMON} freeze_step eps_inside_sqrt",
        "onebitlamb": f"{LAMB} freeze_step coeff_beta factor_max factor_min factor_threshold",
        "zerooneadam": f"""
            {COMMON} eps_inside_sqrt var_freeze_step var_update_scaler local_step_scaler local_step_clipper
        """,
    }
)
OPTIMIZER_NAMES = {"onebitadam": "onebit_adam", "onebitlamb": "onebit_lamb", "zerooneadam": "zero_one_adam"}  # ours
# Arguments of optimizers of which fzero has one value: DeepSpeed's default.
FIXED: dict[str, bool | float] = {
    "amsgrad": False,
    "maximize": False,
    "eps_inside_sqrt": False,
    "dampening": 0,
    "max_grad_norm": 0,
    "coeff_beta": 0.9,
    "factor_max": 4,
    "factor_min": 0.5,
    "factor_threshold": 0.1,
    "var_update_scaler": 16,
}
OTHER_OPTIMIZERS: dict[str, str] = {
    **dict.fromkeys(("muadam", "muadamw", "musgd"), "its rates follow from the model's widths; use by_label"),
    "muon": "DeepSpeed's goes by marks on parameters; use --set optim.name=muon, by names",
}
WARMUP = "warmup_num_steps warmup_type last_batch_iteration"
SCHEDULERS = split_names(
    {
        "WarmupLR": f"warmup_min_lr warmup_max_lr {WARMUP}",
        "WarmupDecayLR": f"total_num_steps warmup_min_lr warmup_max_lr {WARMUP}",
        "WarmupCosineLR": f"total_num_steps warmup_min_ratio cos_min_ratio {WARMUP}",
        "OneCycle": """
            cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size decay_step_size
            cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate last_batch_iteration
        """,
    }
)
OTHER_SCHEDULERS: dict[str, str] = {
    "LRRangeTest": "it raises the rate without end; use runs of a few rates",
}

# The keys of a sparse attention, by mode.
HEADS = "block different_layout_per_head"
GLOBALS = "global_block_indices global_block_end_indices attention"
SLIDING = "num_sliding_window_blocks"
SPARSE = split_names(
    {
        "dense": HEADS,
        "fixed": f"""
            {HEADS} num_local_blocks num_global_blocks attention horizontal_global_attention
            num_different_global_patterns
        """,
        "variable": f"{HEADS} num_random_blocks local_window_blocks {GLOBALS} horizontal_global_attention",
        "bigbird": f"{HEADS} num_random_blocks {SLIDING} num_global_blocks attention",
        "bslongformer": f"{HEADS} {SLIDING} {GLOBALS}",
        "local_sliding_window": f"{HEADS} {SLIDING} attention",
    }
)
ZERO, OFFLOAD = "zero_optimization", ("offload_optimizer", "offload_param")
BUCKETS = """
    contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
    allgather_partitions allgather_bucket_size overlap_comm sub_group_size round_robin_gradients
    stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold
    stage3_max_live_parameters stage3_max_reuse_distance stage3_module_granularity_threshold
    stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential stage3_partition_stream_chunk_size
    mics_hierarchical_params_gather memory_efficient_linear cpu_offload_use_pin_memory
"""
COURSE = """
    enabled curriculum_type min_difficulty max_difficulty schedule_type
    schedule_config.total_curriculum_step schedule_config.difficulty_step
"""
TRANSFERS = """
    pin_memory buffer_count buffer_size fast_init max_in_cpu pipeline pipeline_read pipeline_write super_offload
    cpuadam_cores_perc
"""
# Tables of which DeepSpeed itself refuses a key that it does not know (and sparse attention, a key of which is a
# number of the model); elsewhere it does not look at one.
STRICT = (f"{ZERO}.", "optimizer.params.", "scheduler.params.", "sparse_attention.")
# {what a key becomes, why it changes nothing here, or what to write instead: the keys of which that is so}
TAKEN_KEYS = {
    "`train.batch`: micro-batch x accumulation x data ranks": "train_batch_size",
    "`train.micro_batch`": "train_micro_batch_size_per_gpu",
    "`train.batch`": "gradient_accumulation_steps",
    "`optim.clip`; without it 0, where DeepSpeed after 0.19.2 clips at 1": "gradient_clipping",
    "`train.log_every`": "steps_per_print",
    "`zero`": "zero_optimization.stage",
    "`offload`: cpu is `host`, nvme `nvme`; `params` at stage 3": """
        zero_optimization.offload_optimizer.device zero_optimization.offload_param.device
        zero_optimization.cpu_offload zero_optimization.cpu_offload_param
    """,
    "`nvme.folder`": """
        zero_optimization.offload_optimizer.nvme_path zero_optimization.offload_param.nvme_path
    """,
    "`offload`: `opt=host:RATIO`": "zero_optimization.offload_optimizer.ratio",
    "`precision.policy`; without any it is `fp32`": """
        bf16.enabled bfloat16.enabled fp16.enabled torch_autocast.enabled torch_autocast.dtype
    """,
    "`precision.loss_scale`: 0 is dynamic, another number fixed": "fp16.loss_scale",
    "`precision.loss_scale.init`: 2 to this power": "fp16.initial_scale_power",
    "`precision.loss_scale.window`": "fp16.loss_scale_window",
    "`precision.loss_scale.hysteresis`": "fp16.hysteresis",
    "`precision.loss_scale.floor`": "fp16.min_loss_scale",
    "`codec`: `params=int8`, at stage 3": "zero_optimization.zero_quantized_weights",
    "`codec`: `grads=int4`": "zero_optimization.zero_quantized_gradients",
    "`codec`: `grads=int4,loco=BETA`": "zero_optimization.zeropp_loco_param.err_beta",
    "`codec`: `reset=T`": "zero_optimization.zeropp_loco_param.reset_T",
    "`data.seq_len`, `data.seq_len_warmup`: fixed_linear lengths": within("curriculum_learning", COURSE),
    "`optim.name`: AdamW, Adam (decoupled decay unless `adam_w_mode` is false), Lion, SGD, Lamb, OneBitAdam, "
    "OneBitLamb, ZeroOneAdam": "optimizer.type",
    "`train.layer_drop_theta`, `layer_drop_gamma`, of gpt2 and llama": within(
        "progressive_layer_drop", "enabled theta gamma"
    ),
    "`model.pattern`, if one sees the same; else [block masks](models.md#block-masks)": "sparse_attention.mode",
    "`optim.schedule.name`: WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle; else constant": "scheduler.type",
    "its sizes; attention must be unidirectional": within(
        "sparse_attention", " ".join(dict.fromkeys(sum(SPARSE.values(), ())))
    ),
    "`optim.lr`, `beta1`, `weight_decay` (of all leaves), ...": "optimizer.params.*",
    "`optim.lr`, `train.steps`, `optim.schedule.warmup_steps`, ...": "scheduler.params.*",
}
IGNORED_KEYS = {
    "how DeepSpeed computes or sends": """
        optimizer.params.cuda_aware optimizer.params.comm_backend_name optimizer.params.fused
        optimizer.params.foreach optimizer.params.capturable optimizer.params.set_grad_none
        optimizer.params.fp32_optimizer_states scheduler.params.cycle_first_stair_count
        scheduler.params.cycle_second_stair_count sparse_gradients torch_autocast.*
    """,
    "fzero chooses buckets and overlap; see `--prefetch`": within(ZERO, BUCKETS),
    "transfers are fzero's own; see `--buffer-mb`": f"""
        {within(f"{ZERO}.offload_optimizer", TRANSFERS)} {within(f"{ZERO}.offload_param", TRANSFERS)} aio.*
    """,
    "checkpoints are fzero's own": """
        zero_optimization.stage3_gather_16bit_weights_on_model_save
        zero_optimization.stage3_gather_fp16_weights_on_model_save zero_optimization.load_from_fp32_weights
        zero_optimization.elastic_checkpoint zero_optimization.pipeline_loading_checkpoint
        zero_optimization.save_muon_momentum_buffer_in_memory checkpoint.* nebula.* datastates_ckpt.*
    """,
    "about PyTorch modules": """
        zero_optimization.ignore_unused_parameters zero_optimization.override_module_apply
        zero_optimization.legacy_stage1 zero_optimization.leaf_module.*
        zero_optimization.log_trace_cache_warnings zero_optimization.enable_sanity_checks
        optimizer.legacy_fusion zero_allow_untested_optimizer zero_force_ds_cpu_optimizer fp16.auto_cast
        fp16.fused_mode bf16.immediate_grad_update bf16.check_grad_overflow compile.* disable_allgather
        graph_harvesting vocabulary_size dataloader_drop_last use_data_before_expert_parallelism
    """,
    "divided once, in float32": "prescale_gradients gradient_predivide_factor",
    "use `--remat`, `--offload acts=host` and `--set partition_activations=true`": "activation_checkpointing.*",
    "`fzero report`, `--profile` and `train.loggers` show a run": """
        flops_profiler.* comms_logger.* tensorboard.* wandb.* csv_monitor.* comet.* monitor_config.* timers.*
        wall_clock_breakdown memory_breakdown dump_state
    """,
    "float32 here; see `optim.states=bf16`": """
        communication_data_type seq_parallel_communication_data_type data_types.grad_accum_dtype
        fp16.fp16_master_weights_and_grads bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states
    """,
    "dp is the ranks that other axes leave": "data_parallel_size",
    "see --mesh pp=N": "pipeline.*",
    "their table is not enabled": """
        amp.* elasticity.* autotuning.* eigenvalue.* data_efficiency.* hybrid_engine.* compression_training.*
        quantize_training.*
    """,
    "its tables count where enabled": """
        data_efficiency.enabled data_efficiency.data_sampling.enabled data_efficiency.data_routing.enabled
    """,
}
REFUSED_KEYS = {
    "hysteresis comes back when the scale rises": "fp16.consecutive_hysteresis",
    "use models.quantized": "zero_optimization.zero_quantized_nontrainable_weights",
    "use --mesh dp=N,rp=M --codec hpz, where dp is this number": "zero_optimization.zero_hpz_partition_size",
    "use --mesh dp=N,rp=M, which shards over dp": "zero_optimization.mics_shard_size",
    "no part of an update is made later than the rest": "zero_optimization.zenflow.*",
    "use --mesh tp=N": "tensor_parallel.* autotp_size",
    "use --mesh cp=N --context ulysses": "sequence_parallel_size",
    "use --mesh pp=N": "pipeline.stages",
    "use bf16 or fp16": "amp.enabled",
    "give the batch that it would choose": "elasticity.enabled",
    "use `fzero plan --search`": "autotuning.enabled",
    "use data.curriculum": "data_efficiency.data_sampling.curriculum_learning.enabled",
    "use data.packing=buckets with optim.lr_scaling": "data_efficiency.data_sampling.dynamic_batching.enabled",
    "use train.random_ltd": "data_efficiency.data_routing.random_ltd.enabled",
    "fzero has no such training": """
        eigenvalue.enabled hybrid_engine.enabled compression_training.*enabled quantize_training.enabled
    """,
}
# Values of refused keys, other than none and false, that say what happens here anyway.
ONE_RANK = (None, False, 0, 1)
HARMLESS: dict[str, tuple[Any, ...]] = {
    "zero_optimization.zero_hpz_partition_size": (None, 1),
    "zero_optimization.mics_shard_size": (None, 1, -1),
    "tensor_parallel.*": ONE_RANK,
    "autotp_size": ONE_RANK,
    "sequence_parallel_size": ONE_RANK,
    "pipeline.stages": ONE_RANK,
}
KEYS = tuple(
    Key(name, outcome, reason, HARMLESS.get(name, (None, False)))
    for outcome, rows in ((TAKEN, TAKEN_KEYS), (IGNORED, IGNORED_KEYS), (REFUSED, REFUSED_KEYS))
    for reason, names in rows.items()
    for name in names.split()
)


def markdown() -> str:
    """The tables of docs/migrate.md.

    >>> print(markdown().splitlines()[2])
    | `train_batch_size` | `train.batch`: micro-batch x accumulation x data ranks |
    """
    tables = []
    for outcome, reason, rows in (
        (TAKEN, "becomes", TAKEN_KEYS),
        (IGNORED, "why", IGNORED_KEYS),
        (REFUSED, "instead", REFUSED_KEYS),
    ):
        lines = [
            f"| {', '.join(f'`{name}`' for name in _listed(names.split()))} | {text} |" for text, names in rows.items()
        ]
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
