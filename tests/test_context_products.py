"""Context parallelism with everything else: every form beside adapters, experts, recomputation, compiled blocks,
schedules of pipelines, sums of other orders, float8, the comparisons of silent corruption, evaluations, and
checkpoints that go on elsewhere; ranks without a token that counts, ranks with one token, eight ranks."""

import math

import pipeline_steps
import pytest
import ranks
import test_crosscheck
from close import assert_close, assert_same
from test_checkpoint_ranks import batch_at, config_of, trained
from test_context import equals_one_process
from zero_cases import model_of, packed_batch_for, train, whole

import fzero
from fzero import checkpoint, local_batch
from fzero.core import precision
from fzero.run import build
from fzero.sharding import Context, Pipeline, digests

FORMS = {
    "gather": Context("gather"),
    "gather, balanced": Context("gather", "balanced"),
    "ulysses": Context("ulysses"),
    "ring": Context("ring"),
    "ring, contiguous": Context("ring", "contiguous"),
    "hierarchical": Context("hierarchical"),
}


def of(context, plan=None, **more):
    """Options of `train` for a form, with others of the plan and of the step."""
    return {"plan_options": {"sequence": context, **(plan or {})}, **more}


def masked(context):
    return [("llama", "clipped adam", 3, 2, "no token of a rank", of(context))]


def adapters(context):
    return [
        ("lora", "clipped adam", 3, 2, "documents", of(context, dropout=0.1)),
        ("qlora", "sgd", 0, 2, "documents", of(context)),
    ]


def experts(context):
    return [
        ("moe dropless", "adam", 3, 2, "documents", of(context, dropout=0.1)),
        ("deepseek", "adam", 0, 2, "documents", of(context, dropout=0.1, remat="full")),
    ]


def orders(context):
    """Sums in other orders, within the rounding of float64."""
    return [
        ("gpt2", "clipped adam", stage, 2, "documents", of(context, {"reduce": reduce}, dropout=0.1))
        for stage, reduce in ((3, "canonical"), (1, "once"), (0, "canonical"))
    ]


def recomputed(context):
    return [
        ("gpt2", "clipped adam", 3, 2, "documents", of(context, dropout=0.1, remat=remat))
        for remat in ("full", "every:2", "selective:0.5")
    ]


def compiled(context):
    more = {"compiled": True, "dropout": 0.1}
    return [
        ("gpt2", "adam", 3, 1, "documents", of(context, **more)),
        ("gpt2", "adam", 0, 1, "documents", of(context, **more, remat="full")),
    ]


SUBJECTS = (masked, adapters, experts, orders, recomputed, compiled)


@pytest.mark.parametrize(
    "subject, form",
    [
        pytest.param(subject, form, marks=[pytest.mark.exhaustive] * ((subject, form) != (adapters, "ring")))
        for subject in SUBJECTS
        for form in FORMS
    ],
)
def test_a_form_beside_others_equals_one_process(subject, form):
    equals_one_process("cp2", subject(FORMS[form]), steps=3)


MANY = {  # mesh -> cases; T = 8, so that over cp8 a rank has one token
    "cp8": [
        ("llama", "adam", 3, 1, "documents", of(Context("ring"))),
        ("gpt2", "adam", 0, 1, "documents", of(Context("ring", "contiguous"), dropout=0.1)),
        ("llama", "adam", 1, 1, "documents", of(Context("hierarchical"))),
        ("llama", "adam", 3, 1, "no token of a rank", of(Context("gather", "contiguous"))),
        ("gpt2", "sgd", 2, 1, "documents", of(Context("gather", "balanced"), dropout=0.1)),
    ],
    "cp4": [("llama", "adam", 3, 1, "no token of a rank", of(context)) for context in FORMS.values()],
    "dp2 x cp2 x pp2": [("gpt2", "adam", 3, 2, "documents", of(context, dropout=0.1)) for context in FORMS.values()],
    "dp2 x cp2 x tp2": [
        ("llama", "clipped adam", 3, 2, "documents", of(Context(form, over_tp=True)))
        for form in ("gather", "ring", "ulysses")
    ],
}
MORE = {"cp8": {"cp": 8}, "dp2 x cp2 x tp2": {"dp": 2, "cp": 2, "tp": 2}}


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", MANY)
def test_many_ranks_equal_one_process(mesh):
    equals_one_process(MORE.get(mesh, mesh), MANY[mesh], steps=3)


SCHEDULES = {
    "interleaved": Pipeline("interleaved", chunks=2),
    "zb-h1": Pipeline("zb-h1"),
    "zb-v": Pipeline("zb-v", chunks=2),
    "dualpipe-v": Pipeline("dualpipe-v", chunks=2),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("form", FORMS)
def test_a_schedule_equals_one_process(schedule, form):
    """Also those whose backward passes are in two parts, which cut the graph around messages."""
    more = {"dropout": 0.1, "sizes": {"n_layers": 4}}
    options = of(FORMS[form], {"pipeline": SCHEDULES[schedule]}, **more)
    cases = [("gpt2", "clipped adam", stage, 4, options) for stage in (3, 0)]
    pipeline_steps.equals_one_process({"pp": 2, "cp": 2}, cases, steps=3)


# ---- what is not equal in float64 ------------------------------------------------------------------------------------


def in_float8(mesh, context, cases):
    """[(parameters, losses)] of steps by (policy, stage)."""
    out = []
    for policy, stage in cases:
        options = {"plan_options": {"sequence": context}, "policy": precision.POLICIES[policy](), "rows": 8}
        state, specs, log = train(mesh, "llama", "adam", stage, 2, **options, batches=packed_batch_for)
        out.append((whole(state, specs, mesh).params, [row[0] for row in log]))
    return out


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_float8_has_scales_of_a_rank_and_the_same_bits_at_every_stage(form):
    """A scale is of the tokens that a rank of cp has, which changes the rounding: the losses are near those of one
    process. At stage 3, and with weights gathered as float8, they are those of stage 0."""
    for policy in ("bf16_float8", "bf16_float8_rowwise"):
        cases = [(policy, 0), (policy, 3), *([("bf16_float8_gather", 3)] if policy == "bf16_float8" else [])]
        ((_, alone),) = in_float8(fzero.one_process(), False, cases[:1])
        for first, *others in ranks.run(2, in_float8, FORMS[form], cases, mesh={"cp": 2}):
            assert_close(first[1], alone, rtol=0.05)
            for other in others:
                assert other[1] == first[1]
                assert_same(other[0], first[0])


def compared(mesh, contexts):
    return [test_crosscheck.sound(mesh, [{**case, "sequence": context} for case in CHECKED]) for context in contexts]


CHECKED = [{"stage": 0, "policy": "bf16"}, {"stage": 3, "policy": "fp32"}]


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [{"cp": 2}, {"dp": 2, "cp": 2}], ids=str)
def test_sound_ranks_agree(sizes):
    """Gradients of a micro-batch that another data rank computes again, and what is the same on ranks of cp."""
    for found in ranks.run(math.prod(sizes.values()), compared, list(FORMS.values()), mesh=sizes):
        assert found == [[[]] * len(CHECKED)] * len(FORMS)


@pytest.mark.exhaustive
def test_a_processor_that_computes_wrongly_is_named():
    """Of two ranks that have the same micro-batch and other tokens, the one that is off."""
    said = ranks.run(4, test_crosscheck.faulty_processor, 3, 2, mesh={"dp": 2, "cp": 2})
    for lines in said:
        assert lines == [
            "rank 1 and rank 3 compute one micro-batch and differ, first in blocks/mlp/w_in",
            "rank 3 and rank 1 compute one micro-batch and differ, first in blocks/mlp/w_in",
        ]


# ---- evaluations -----------------------------------------------------------------------------------------------------


def evaluated(mesh, contexts):
    """[sums of an evaluation on all ranks] of each (model, form)."""
    out = []
    for name, context in contexts:
        model = model_of(name, dropout=0.1)
        plan = fzero.zero_plan(3, model, mesh, policy=precision.fp64(), sequence=context)
        params = fzero.init_state(model, fzero.optim.sgd(0.1), plan, seed=3).params
        batch = local_batch(packed_batch_for(1, 24), mesh)
        found = fzero.make_eval_step(model, plan)(params, batch)
        out.append({"total": found.total, "num_tokens": found.num_tokens, **found.extra})
    return out


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [{"cp": 2}, {"dp": 2, "cp": 2}, {"pp": 2, "cp": 2}], ids=str)
def test_an_evaluation_is_that_of_one_process(sizes):
    cases = [(name, context) for name in ("gpt2", "moe dropless") for context in FORMS.values()]
    alone = dict(
        zip(("gpt2", "moe dropless"), evaluated(fzero.one_process(), [("gpt2", False), ("moe dropless", False)]))
    )
    for found in ranks.run(math.prod(sizes.values()), evaluated, cases, mesh=sizes):
        for (name, _), sums in zip(cases, found):
            assert_close(sums, alone[name], rtol=1e-10)


# ---- from one mesh to another ----------------------------------------------------------------------------------------

KINDS = {
    "alone": ({}, 0, {}),
    "cp2 ring": ({"cp": 2}, 3, {"context": "ring"}),
    "cp2 gather": ({"cp": 2}, 1, {"context": "gather:balanced"}),
    "cp4 hierarchical": ({"cp": 4}, 3, {"context": "hierarchical"}),
    "cp4 ulysses": ({"cp": 4}, 2, {"context": "ulysses"}),
    "dp2": ({"dp": 2}, 3, {}),
    "dp2 x cp2": ({"dp": 2, "cp": 2}, 3, {"context": "ring:zigzag"}),
}
HALF = 3  # steps


def made_on(mesh, kind):
    sizes, stage, more = KINDS[kind]
    # Without the average that the optimizer of the config has in float32.
    return build.build(config_of(sizes, stage, "", "fp64", reduce="fast", **more), mesh, None)


def saved_by(mesh, kind, home):
    made = made_on(mesh, kind)
    state, losses = trained(made, build.first_state(made), HALF)
    specs = build.specs_of(made)
    checkpoint.save(home / kind, state, step=HALF, specs=specs, mesh=mesh, config={"kind": kind})
    return digests(state, specs, mesh), losses


def resumed_on(mesh, kind, home, sources):
    """{source: (digests of what was restored, losses from there)}"""
    out = {}
    for source in sources:
        made = made_on(mesh, kind)
        state = build.restore(made, checkpoint.step_folder(home / source, HALF))
        restored = digests(state, build.specs_of(made), mesh)
        out[source] = restored, trained(made, state, HALF)[1]
    return out


def on(kind, function, *args):
    sizes = KINDS[kind][0]
    if not sizes:
        return [function(fzero.one_process(), kind, *args)]
    return ranks.run(math.prod(sizes.values()), function, kind, *args, mesh=sizes)


@pytest.mark.exhaustive
def test_a_checkpoint_goes_on_on_any_mesh(tmp_path):
    """What is restored has the bits of what was saved, and goes on as one process does, within 1e-10."""
    made = made_on(fzero.one_process(), "alone")
    expected = trained(made, build.first_state(made), 2 * HALF)[1]
    saved = {}
    for kind in KINDS:
        saved[kind], losses = on(kind, saved_by, tmp_path)[0]
        assert_close(losses, expected[:HALF], rtol=1e-10)
    for kind in KINDS:
        for found in on(kind, resumed_on, tmp_path, list(KINDS)):
            for source, (restored, losses) in found.items():
                assert restored == saved[source], (source, kind)
                assert_close(losses, expected[HALF:], rtol=1e-10)
    assert batch_at(0)["tokens"].shape[1] == 8  # over cp4 and zigzag blocks of a token
