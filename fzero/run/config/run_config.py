"""The configuration of a run as a value: frozen dataclasses, tables in, JSON out and back exactly.

A table (of a TOML or JSON file, or of `--set`) names a preset and the values that differ from it. Values that are wrong
whatever the data and the machine are refused here.

A field has all that is said of a key alone. Its type: bounds, choices or parser, what the key needs to do anything, the
axis whose ranks it is for, whether a resumed run may change it. Its comment: the help.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fzero.comm.axes import CP, EP, PP, TP
from fzero.core import gpu
from fzero.core.config_tables import (
    CORRECTIONS,
    FRACTION,
    LENGTH,
    POSITIVE,
    RATE,
    SEED,
    SIZE,
    STAGE,
    Amount,
    Count,
    Fraction,
    Positive,
    Rate,
    Share,
    Size,
    Within,
    optional,
)
from fzero.core.precision import POLICIES, LossScale
from fzero.data.mixture import Mixture
from fzero.data.packing import PACKINGS, TOO_LONG
from fzero.models import MLPConfig, ModelConfig
from fzero.optim.schedules import RISES
from fzero.run.config.config_checks import expect_loggers, validate
from fzero.run.config.curriculum import BUCKETS, SCALINGS, SIZES
from fzero.run.config.objectives import OBJECTIVES, Objective
from fzero.run.config.stages import Ramp, expect_stages
from fzero.run.config.unused_keys import (
    AT_URL,
    CHANGING,
    CHAT_TOKENIZER,
    CONVERSATIONS,
    EXAMPLES,
    GROWING,
    LOCATION,
    OF_DPO,
    OF_FP16,
    OPTIMIZERS,
    OUTER,
    ROLLING_BACK,
    SCHEDULES,
    SKIPPING,
    SPIKES,
    Gathering,
    OverAxis,
    Placement,
)
from fzero.sharding.codec import Codec
from fzero.sharding.context import Context
from fzero.sharding.experts import Experts
from fzero.sharding.pipeline_plan import Pipeline
from fzero.sharding.zero_stages import REDUCE
from fzero.train.execution import CAPTURE, SIGMAS, UPDATES, WARMUP, WINDOW


@dataclass(frozen=True)
class Data:
    """The training text."""

    path: Annotated[str, LOCATION] = (
        "stdlib"  # a prepared corpus (or its URL), or text to prepare once: a file, a folder, "stdlib"
    )
    # several prepared corpora in place of path, such as "web=corpora/web:0.7,code=corpora/code:0.3"; see docs/data.md
    mixture: Annotated[str, optional(Mixture.parse)] = ""
    tokenizer: str = "bytes"  # of text to prepare, as in `fzero data prepare`
    # a chat template (a file of Jinja) for conversations; "": the one beside the tokenizer
    template: Annotated[str, CONVERSATIONS, LOCATION] = ""
    # special tokens that the tokenizer of the model gets, and "template" for those that the chat template writes and
    # the vocabulary lacks; of conversations, pairs and texts with labels
    add_tokens: Annotated[tuple[str, ...], CHAT_TOKENIZER] = ()
    seq_len: Annotated[int, Within(LENGTH)] = 256
    # of conversations, pairs and texts with labels: error, drop the line, or cut off its end
    too_long: Annotated[str, TOO_LONG, EXAMPLES] = "error"
    # how documents fill sequences: stream (end to end), best-fit (whole, the rest filled up), buckets (each in a row of
    # its own, batches of rows of one length, of as many positions), see docs/data.md
    packing: Annotated[str, (*PACKINGS, BUCKETS)] = "stream"
    bucket_lengths: str = ""  # of buckets: of their rows, "64,128,256" up to seq_len; "": 1/8, 1/4, 1/2 and all of it
    within_documents: bool = True  # a token attends to its own document only
    # the analysis by which easy rows come first, such as "rarity" (fzero data analyze); its digest is recorded at the
    # start of a run: "rarity@0123456789abcdef". "": a permutation
    curriculum: str = ""
    curriculum_schedule: str = "linear"  # how the part that is allowed grows: linear, root:2, discrete:0.3@0.25,0.6@0.5
    curriculum_start: Share = 0.1  # the part of the rows that is allowed at first
    curriculum_steps: Count = 0  # after which all rows are allowed
    curriculum_tokens: Count = 0  # in place of curriculum_steps
    # rows are read as pieces, each a document of its own, of START tokens at first, and of INCREMENT more after each
    # TOKENS tokens of the run, up to seq_len: "64:64:1e8"
    seq_len_warmup: str = ""
    # the part of the documents whose middle is learned after their end (fill in the middle), and the tokens that begin
    # prefix, middle and suffix, "PREFIX,MIDDLE,SUFFIX" or their ids; "": the tokenizer's usual ones
    fim: Fraction = 0.0
    fim_tokens: str = ""
    # the part of the documents of which spans are taken out, to be learned after their end (T5's span corruption in one
    # sequence), the part of their tokens and the mean length of a span
    span_corruption: Annotated[float, Within((0.0, True, 1.0, True))] = 0.0
    noise_density: Share = 0.15
    mean_noise_span_length: Annotated[float, Within(SIZE)] = 3.0
    sentinel_tokens: str = ""  # that stand for spans, such as "<a>,<b>,<c>" or ids "32000-32099"; "": <extra_id_0>, ...
    # how much targets count: "<tool>=0,10=0.25" by tokens or ids, others 1; or weights.npy, one for each id,
    # whose digest is recorded at the start of a run
    token_weights: str = ""
    # of corpora at URLs: the folder of their pieces, of this machine; "": in the user's caches
    cache: Annotated[str, AT_URL, LOCATION] = ""
    cache_gb: Annotated[Positive, AT_URL] = 20.0  # its size, of all ranks of the machine together
    retry_minutes: Annotated[Rate, AT_URL] = 5.0  # how long their store may be away


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the run as a fraction of its peak; SCHEDULES says which numbers count."""

    name: Annotated[str, SCHEDULES] = "cosine"
    warmup_steps: Count = 0  # linear from 0
    end: Rate = 0.1  # the fraction at the last step
    power: Positive = 1.0
    decay_steps: Count = 0  # the last steps of the run, in which wsd decays
    decay: Annotated[str, ("linear", "sqrt", "cosine")] = "linear"
    rise: Share = 0.3  # fraction of the steps until the peak
    warmup: Annotated[str, RISES] = "log"  # DeepSpeed's warmup: log, or linear
    start: Fraction = 0.0  # the fraction that DeepSpeed's warmup, and its cycle, begin with
    # of cycle_lr, after its cycle of warmup_steps up and decay_steps down: the rate is divided by 1 + decay_rate after
    # decay_every steps; 0: it stays. The momentum (beta1 of adam and adamw) falls from high to low and rises again;
    # left out: it stays
    decay_rate: Rate = 0.0
    decay_every: Count = 0
    low_beta1: Annotated[float | None, Within(FRACTION)] = None
    high_beta1: Annotated[float | None, Within(FRACTION)] = None
    # tokens after which it ends: the rate then follows the tokens of the run and not its steps; 0: its steps
    tokens: Count = 0
    warmup_tokens: Count = 0  # in place of warmup_steps and decay_steps, with tokens
    decay_tokens: Count = 0


@dataclass(frozen=True)
class Optim:
    """The optimizer. Which numbers count depends on the name: see OPTIMIZERS."""

    name: Annotated[str, OPTIMIZERS] = "adamw"
    lr: Annotated[Rate, CHANGING] = 3e-3  # the schedule's peak
    lr_rest: Annotated[Rate, CHANGING] = 0.0  # muon: AdamW's peak, for leaves other than matrices of blocks
    weight_decay: Annotated[Rate, CHANGING] = 0.1
    decay: Annotated[str, ("matrices", "all"), CHANGING] = "matrices"  # the leaves that decay: matrices, or all
    beta1: Annotated[Fraction, CHANGING] = 0.9
    beta2: Annotated[Fraction, CHANGING] = 0.95
    eps: Annotated[Rate, CHANGING] = 1e-8
    momentum: Annotated[Fraction, CHANGING] = 0.0
    nesterov: Annotated[bool, CHANGING] = False
    # how muon scales an update with the matrix's shape
    adjust: Annotated[str, ("original", "match_rms_adamw")] = "original"
    # of Adam's bias and LAMB's: moments, rate (of lamb, DeepSpeed's) or none, see optim.adamw
    correction: Annotated[str, CORRECTIONS] = "moments"
    # lamb, onebit_lamb: bounds of the ratio of norms; left out: lamb has none, onebit_lamb DeepSpeed's 0.01 and 10
    min_ratio: Annotated[float | None, Within(RATE)] = None
    max_ratio: Annotated[float | None, Within(RATE)] = None
    # of adamw, adam and lion: in the precision's dtype, bf16 (stochastic rounding) or 8bit
    states: Annotated[str, ("full", "bf16", "8bit")] = "full"
    # onebit_adam, onebit_lamb: the steps of the warm-up, 0: a fifth of train.steps, of onebit_lamb a half;
    # zero_one_adam: the steps in which v moves at all, 0: all, or with local steps a fifth of train.steps
    freeze_steps: Count = 0
    # zero_one_adam: after those steps ranks sum once in so many, and move apart in between; 1: they sum in each step
    sum_every: Size = 1
    sum_double: Count = 0  # so many steps first sum each, then each second, fourth, ... up to sum_every; 0: at once
    clip: Annotated[Rate, CHANGING] = 1.0  # largest norm of the gradient; 0: as it is
    # of data.packing=buckets: how the learning rate follows the size of a batch, none, linear or sqrt, in sequences (1
    # for train.batch of them) or tokens (1 for train.batch x data.seq_len)
    lr_scaling: Annotated[str, SCALINGS] = "none"
    lr_scaling_by: Annotated[str, SIZES] = "sequences"
    schedule: Annotated[ScheduleConfig, CHANGING] = ScheduleConfig()


@dataclass(frozen=True)
class Precision:
    """How numbers are kept and multiplied; "auto" is decided at the start."""

    # bf16 if bf16 products are faster than fp32 ones, else fp32
    policy: Annotated[str, ("auto", *POLICIES), Placement("")] = "auto"
    # onednn: its split of a float32 product into bfloat16 ones, if that is as exact and faster
    fp32_matmul: Annotated[str, ("auto", "default", "onednn")] = "auto"
    loss_scale: Annotated[LossScale, OF_FP16] = field(default_factory=LossScale)  # of fp16


@dataclass(frozen=True)
class Train:
    """The loop. `batch` sequences a step are made of pieces of `micro_batch`; an interval of 0 is never."""

    steps: Annotated[Amount, CHANGING] = 1000
    batch: Amount = 16
    # of a batch that grows: its first size, by how much and after how many tokens it grows, up to `batch`: "16:16:1e8"
    batch_ramp: Annotated[str, optional(Ramp.parse), GROWING] = ""
    micro_batch: Amount = 4
    # tokens of each sequence that the layers between the first and the last compute (random-LTD, see docs/data.md); 0:
    # all. random_ltd_ramp: fewer at first, up to that: "64:64:1e8"
    random_ltd: Count = 0
    random_ltd_ramp: str = ""
    # progressive layer dropping (see docs/data.md): the part of the steps that the last layers take part in at the end,
    # 1: all, and how fast it falls to that, by exp(-gamma x steps)
    layer_drop_theta: Annotated[float, Within((0.0, False, 1.0, True))] = 1.0
    layer_drop_gamma: Rate = 0.001
    seed: Annotated[int, Within(SEED)] = 0
    remat: str = "none"
    compiled: Annotated[str | bool, ("auto", True, False)] = "auto"  # auto: if there is a compiler
    # auto: on a GPU steps are replayed as one graph where the host issues them too slowly
    capture: Annotated[str, CAPTURE] = "off"
    # with offloaded states also: backward (each layer when its gradient is reduced); delayed: see docs/pipeline.md
    update: Annotated[str, UPDATES] = "end"
    updates: Amount = 1  # of a step with update=delayed, each of as many of its micro-batches
    delay_after: Count = 0  # with update=delayed: the first steps, whose updates are not delayed yet
    # the form of each hot operation: auto, reference, or exceptions such as auto,attention=blocked
    kernels: str = "auto"
    ema_decay: Fraction = 0.0  # 0: no average of the weights
    eval_every: Annotated[Count, CHANGING] = 100
    eval_batches: Annotated[Count, CHANGING] = 16  # micro-batches of an evaluation; 0: the whole validation split
    loss_by_position: bool = False  # of evaluations: the mean loss in ranges of positions, see docs/measure.md
    checkpoint_every: Annotated[Count, CHANGING] = 500
    keep_last: Annotated[Count, CHANGING] = 2  # checkpoints; 0: all
    keep_every: Annotated[Count, CHANGING] = 0  # of these steps all are kept; 0: none
    checkpoints: Annotated[str, LOCATION] = (
        ""  # their folder, or a URL such as s3://bucket/run; "": checkpoints/ in the run folder
    )
    # checkpoints: none, zstd (lossless), 8bit (an optimizer's moments in codes: lossy), or 8bit,zstd
    compress: Annotated[str, ("none", "zstd", "8bit", "8bit,zstd")] = "none"
    # memory of a rank for the copy that is written while training goes on; 0: the state's size if there is room
    snapshot_mb: Count = 0
    # if a checkpoint cannot be written: continue, and try again at the next; or stop
    on_save_error: Annotated[str, ("continue", "stop"), CHANGING] = "continue"
    log_every: Annotated[Amount, CHANGING] = 20
    # beside metrics.jsonl: tensorboard, wandb, csv; auto: TensorBoard if installed
    loggers: Annotated[tuple[str, ...], expect_loggers] = ("auto",)
    # rows of metrics.jsonl with norms by layer and times by rank; 0: none, and no record of memory and ledger
    measure_every: Count = 20
    digest_every: Count = 0  # rows of metrics.jsonl with a digest of all parameters, for fzero replay and bisect
    hang_s: Rate = 600.0  # end all processes, naming the rank, if one makes no progress for this time; 0: never
    memory_check: bool = True


@dataclass(frozen=True)
class NvmeConfig:
    """The disk that offloaded leaves rest on."""

    folder: Annotated[str, Placement("--nvme"), LOCATION] = (
        ""  # on a disk that all ranks see, or a URL of tensorstore's; "": nvme/ in the run folder
    )
    buffer_mb: Annotated[Count, Placement()] = 0  # memory for transfers to and from the disk; 0: as the plan needs
    # versions on the disk: 2 make every step atomic, each one more keeps a checkpoint; 1 saves the space
    slots: Size = 2
    verify: bool = True  # checksums with every write, compared when the run is resumed


@dataclass(frozen=True)
class Guard:
    """Policies for bad steps and for hardware that computes wrongly: see docs/guard.md."""

    # a gradient that is not finite: skip the update, rollback to a checkpoint, or stop
    nonfinite: Annotated[str, ("skip", "rollback", "stop")] = "skip"
    max_skipped: Annotated[Size, SKIPPING] = 50  # steps skipped in a row, at which the run ends
    # a loss far above those before it: off, skip or rollback
    spike: Annotated[str, ("off", "skip", "rollback")] = "off"
    # how far above their mean is a spike, in their standard deviations
    sigmas: Annotated[float, Within(SIGMAS), SPIKES] = 6.0
    window: Annotated[int, Within(WINDOW), SPIKES] = 100  # steps that the mean and the deviation remember
    warmup: Annotated[int, Within(WARMUP), SPIKES] = 50  # losses seen before one is judged
    rollback_steps: Annotated[Count, ROLLING_BACK] = 0  # a rollback goes back at least this many steps
    # without a new checkpoint after the step that went wrong, at which the run ends
    max_rollbacks: Annotated[Size, ROLLING_BACK] = 10
    check_every: Count = 0  # steps between two comparisons of the ranks' results and replicas; 0: none


@dataclass(frozen=True)
class DPO:
    """Direct preference optimization, for objective=dpo: see models.dpo."""

    beta: Positive = 0.1  # how near the reference it stays; the larger, the nearer
    # the fraction of pairs whose preference is taken to be wrong, below 0.5
    smoothing: Annotated[float, Within((0.0, True, 0.5))] = 0.0
    # the digest of the reference, whose log-probabilities are beside the corpus; "": the model that the run starts
    # from, recorded at its start
    reference: str = ""


@dataclass(frozen=True)
class LocalSteps:
    """Members, the replicas over rp, that train apart and agree once in `every` steps: see docs/codec.md."""

    # localsgd, slowmo or diloco; "": the replicas sum their gradients in each step
    method: Annotated[str, ("", *OUTER)] = ""
    every: Size = 20  # steps
    # of the outer optimizer; left out: the method's own
    lr: Annotated[float | None, Within(POSITIVE)] = None
    momentum: Annotated[float | None, Within(FRACTION)] = None
    codec: str = ""  # in which differences travel: int8, int4 or fp8_e4m3; "": as they are
    after: Count = 0  # the first steps, after each of which members take their mean: they train apart from then on


@dataclass(frozen=True)
class RunConfig:
    """A whole run. Raises ValueError naming the key, its value, what is allowed and the fix."""

    preset: str = ""  # that the other values started from; "" for none
    # cpu or cuda; auto: the GPU where there is one. Decided at the start of a run and recorded
    device: Annotated[str, gpu.KINDS, Placement(""), LOCATION] = "auto"
    model: ModelConfig = field(default_factory=MLPConfig)
    # what is learnt: text (each next token), chat (what the assistant says), dpo (to prefer one answer to another),
    # classify (the classes of texts), reward (a score for answers)
    objective: Annotated[str, OBJECTIVES] = "text"
    dpo: Annotated[DPO, OF_DPO] = DPO()
    data: Data = Data()
    optim: Optim = Optim()
    precision: Precision = Precision()
    train: Train = Train()
    mesh: dict[str, int] = field(default_factory=dict)  # sizes of its axes; empty: dp over all processes
    zero: Annotated[int, Within(STAGE), Placement()] = 0  # ZeRO stage
    # sums over ranks; once: whole over micro-batches first; canonical: alike on every mesh
    reduce: Annotated[str, REDUCE, Placement()] = "fast"
    sequence: Annotated[bool, OverAxis(TP), Placement()] = False  # sequence parallelism over tp
    # attention over cp: a form of Context, "hierarchical/2", "gather:contiguous"
    context: Annotated[str, Context.parse, OverAxis(CP), Placement()] = "auto"
    # how tokens come to experts over ep: gather, exchange, exchange:SLACK[:PARTS]
    experts: Annotated[str, Experts.parse, OverAxis(EP), Placement()] = "auto"
    # in how few bytes parameters and gradients travel: "params=int8,grads=int4,hpz"; "" is as they are, or "grads=1bit"
    # or "grads=1bit,local" of an optimizer that sends signs
    codec: Annotated[str, optional(Codec.parse), Placement()] = ""
    local: LocalSteps = LocalSteps()
    # over pp: its schedule, chunks of a rank, layers of a stage
    pipeline: Annotated[Pipeline, OverAxis(PP), Placement()] = field(default_factory=Pipeline)
    prefetch: Annotated[Count, Gathering(), Placement()] = 1  # layers gathered ahead of their use at stage 3
    # stage 3: a layer's parameters are dropped after its forward pass and gathered again
    reshard: Annotated[bool, Gathering(), Placement("")] = True
    # stage 3 or offloaded parameters: stages of a rank that may stay whole between micro-batches
    resident: Annotated[Count, Gathering(), Placement()] = 0
    # over tp without sequence: a rank keeps its part of what remat keeps
    partition_activations: Annotated[bool, OverAxis(TP), Placement("")] = False
    # memories of groups of leaves: "params=nvme,opt=nvme,acts=host", "opt=host:0.5"; "" is all on the device
    offload: Annotated[str, Placement()] = ""
    nvme: NvmeConfig = NvmeConfig()
    # GB of this host's memory for the run's processes, where the system tells too little; 0: what it says is available
    host_memory_gb: Annotated[float, Within((0.0, True, 1e6)), Placement("--host-memory")] = 0.0
    guard: Guard = Guard()
    # of the run, before its last one: the last step of each and what it has otherwise than the one after it, such as
    # "1000: data.seq_len=8192"; --resume with another --seq-len writes them
    stages: tuple[str, ...] = ()

    @property
    def task(self) -> Objective:
        """The Objective of its name."""
        return OBJECTIVES[self.objective]

    def __post_init__(self) -> None:
        validate(self)
        expect_stages(self)
