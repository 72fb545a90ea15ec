"""Tables of pipeline schedules with one mistake each, gathers of parameters, schedules as text, and layers cut into
stages."""

import itertools
import math
import random
import re
from collections import Counter

import pytest
from pipeline_cases import CASES, made, serves, stages_of
from test_docs import ROOT, blocks_of, run_python

from fzero.report import figures
from fzero.report.bars import schedule_bars
from fzero.sharding import Act, Schedule, Stages, pipeline, play, stage_ranks

# ---- what is refused ----


@pytest.mark.parametrize(
    ("name", "stages", "m", "said"),
    [
        ("zb-w", (2, 1, "loop"), 2, "no schedule 'zb-w'; the schedules are gpipe, 1f1b"),
        ("1f1b", (2, 1, "loop"), 0, "the number of micro-batches is 0"),
        (
            "1f1b",
            (2, 2, "loop"),
            4,
            "1f1b has one stage a rank; 4 stages on 2 ranks are 2; .* take interleaved, .*zb-v",
        ),
        (
            "zb-v",
            (2, 2, "loop"),
            4,
            r"zb-v has stages on ranks 0 1 1 0; these are on 0 1 0 1: .*layout\(costs, 2, 2, 'v'\)",
        ),
        ("interleaved", (2, 2, "v"), 4, "interleaved has stages on ranks 0 1 0 1; these are on 0 1 1 0"),
        ("dualpipe-v", (4, 2, "v"), 7, "dualpipe-v on 4 ranks needs at least 8 micro-batches, and there are 7"),
        (
            "interleaved",
            (4, 2, "loop"),
            11,
            "in equal groups of 4 or somewhat more, and 11 has none; 10 or 12 would do",
        ),
        ("interleaved-zb", (3, 2, "loop"), 7, "7 has none; 6 or 8 would do"),
    ],
)
def test_what_a_schedule_cannot_be_made_for_is_refused(name, stages, m, said):
    with pytest.raises(ValueError, match=said) as error:
        pipeline.schedule(name, stages_of(*stages), m)
    assert "\n" not in str(error.value)


def test_the_numbers_that_would_do_do():
    for p, m in itertools.product(range(2, 9), range(2, 40)):
        if not serves("interleaved", p, m, 2):
            with pytest.raises(ValueError, match=r"; \d+ or \d+ would do$") as error:
                made("interleaved", p, m, 2)
            assert all(serves("interleaved", p, int(n), 2) for n in re.findall(r"(\d+) or (\d+)", str(error.value))[0])


def refused(s, said):
    with pytest.raises(ValueError, match=said) as error:
        pipeline.check(s)
    assert "\n" not in str(error.value) and str(error.value).startswith(f"schedule {s.name}: ")


def without(s, rank, i):
    row = s.rows[rank]
    return s._replace(rows=(*s.rows[:rank], row[:i] + row[i + 1 :], *s.rows[rank + 1 :]))


def insert(s, rank, i, *acts):
    row = s.rows[rank]
    return s._replace(rows=(*s.rows[:rank], row[:i] + acts + row[i:], *s.rows[rank + 1 :]))


@pytest.mark.parametrize(("name", "v"), CASES)
def test_an_act_too_few_too_many_or_elsewhere_is_found(name, v):
    s = made(name, 2, 4, v)
    for rank, row in enumerate(s.rows):
        for i, act in enumerate(row):
            refused(
                without(s, rank, i),
                f"rank {rank} has no {act}, the",
            )
            refused(insert(s, rank, len(row), act), f"rank {rank} has {act} twice")
            refused(
                insert(without(s, rank, i), 1 - rank, 0, act),
                f"rank {1 - rank} has {act}, and stage {act.stage} is on rank {rank}",
            )


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (Act("X", 0, 0), "0X0 is of kind 'X'; the kinds are F, B, I, W, G, D"),
        (Act("F", 4, 0), "0F4 is of micro-batch 4; they are 0 to 3"),
        (Act("F", -1, 0), "is of micro-batch -1"),
        (Act("F", 0, 2), "2F0 is of stage 2; the stages are 0 to 1"),
        (Act("I", 0, 0), "rank 0 has 0B0 and 0I0; a backward is whole or split"),
        (Act("D", 0, 0), "0D0 drops parameters that are not there"),
        (Act("G", 0, 0), "rank 0 gathers parameters at 0G0 and never drops them"),
    ],
)
def test_an_act_that_cannot_be_is_found(act, said):
    refused(insert(made("1f1b", 2, 4, 1), 0, 0, act), said)


def swapped(s, rank, one, other):
    row = list(s.rows[rank])
    i, j = (next(k for k, act in enumerate(row) if str(act) == text) for text in (one, other))
    row[i], row[j] = row[j], row[i]
    return s._replace(rows=(*s.rows[:rank], tuple(row), *s.rows[rank + 1 :]))


def test_a_wrong_order_is_found():
    s, split = made("1f1b", 2, 4, 1), made("zb-h1", 3, 4, 1)
    refused(swapped(s, 1, "1F2", "1F3"), "rank 1: 1B2 comes before 1F2, whose result it needs")
    refused(swapped(made("gpipe", 2, 4, 1), 0, "0F2", "0F3"), "0F3 comes before 0F2; the forwards of a stage come in")
    refused(swapped(made("gpipe", 2, 4, 1), 1, "1B0", "1B1"), "1B1 comes before 1B0; the backwards of a stage")
    refused(swapped(split, 2, "2W2", "2W3"), "2W3 comes before 2W2; the backwards by weights of a stage come in")
    refused(swapped(split, 0, "0I0", "0W0"), "rank 0: 0W0 comes before 0I0, whose result it needs")
    refused(s._replace(pairs=((Act("F", 0, 0), Act("B", 0, 0)),)), "0F0 and 0B0 are no pair")
    refused(s._replace(rows=s.rows[:1]), "it has 1 rows, and its stages are on ranks 0, 1")
    refused(s._replace(stages=s.stages._replace(layers=((0,),))), "layers are given for 1 stages, and ranks for 2")
    refused(s._replace(parts=0), "0 micro-batches")


def table(text, name="own"):
    """The rows of a text as they are, unchecked."""
    rows = tuple(
        tuple(Act(kind, int(part), int(stage)) for stage, kind, part in re.findall(r"(\d+)([A-Z])(\d+)", line))
        for line in text.splitlines()
    )
    acts = [(act.stage, rank, act.micro_batch) for rank, row in enumerate(rows) for act in row]
    ranks = tuple(dict((stage, rank) for stage, rank, _ in sorted(acts)).values())
    return Schedule(name, Stages(tuple((i,) for i in range(len(ranks))), ranks), 1 + max(a[2] for a in acts), rows)


def test_a_deadlock_names_the_circle_of_ranks():
    s = table("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    refused(s, "it deadlocks: rank 0 waits at 0B0 for 1B0, rank 1 waits at 1F1 for 0F1$")
    with pytest.raises(ValueError, match="schedule own: it deadlocks: rank 0 waits at 0B0 for 1B0, rank 1"):
        play(s, {"F": 1, "B": 2})
    assert str(s).splitlines()[2:] == [
        "rank 0 F0",
        "rank 1    F0",
        "rank 0 waits at 0B0 for 1B0",
        "rank 1 waits at 1F1 for 0F1",
    ]


def test_a_pair_that_waits_for_itself_is_found():
    s = table("0F0 2F0 0F1 2B0 2F1 2B1 0B0 0B1\n1F0 3F0 1F1 3B0 3F1 3B1 1B0 1B1")
    pipeline.check(s)
    paired = s._replace(pairs=((Act("F", 1, 0), Act("B", 0, 2)),))
    refused(paired, r"it deadlocks: rank 0 waits at 2B0 for 3B0, rank 1 waits at 1F1 for 0F1 \(if pairs run together\)")
    assert play(paired, {"F": 1, "B": 2}) == play(s, {"F": 1, "B": 2})
    with pytest.raises(ValueError, match="deadlocks"):
        play(paired, {"F": 1, "B": 2, "F&B": 3})


def test_interleaving_may_deadlock_if_the_last_group_is_shorter():
    """Why groups must be equal: groups of p, as published, where p does not divide m."""
    p, v, m, groups = 4, 3, 5, (4, 1)
    forwards = [chunk for size in groups for chunk in range(v) for _ in range(size)]
    rows = []
    for r in range(p):
        warm, count, row = 2 * (p - r - 1) + (v - 1) * p + 1, Counter(), []
        order = [("F", chunk) for chunk in forwards[:warm]]
        for k, chunk in enumerate(forwards):
            order += [("B", v - 1 - chunk), *(("F", one) for one in forwards[warm + k : warm + k + 1])]
        for kind, chunk in order:
            row.append(Act(kind, count[kind, chunk], chunk * p + r))
            count[kind, chunk] += 1
        rows.append(tuple(row))
    short = Schedule("own", stages_of(p, v, "loop"), m, tuple(rows))
    refused(short, "it deadlocks: rank 0 waits at 8F4 for 7F4, rank 3 waits at 7B0 for 8B0$")


def test_messages_that_are_wanted_in_another_order_than_they_are_sent_are_found():
    sound = "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\n1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    pipeline.check(table(sound))
    crossed = table(sound.replace("1F0 1F1 3F0 3B0", "1F0 3F0 1F1 3B0"))
    refused(crossed, "rank 1: 3F0 comes before 1F1, and rank 0 has 0F1 before 2F0; messages are received in the order")


def test_a_gather_in_the_wrong_place_is_found():
    s = pipeline.with_gathers(made("interleaved", 2, 4, 2), 1)
    pipeline.check(s)
    for rank, row in enumerate(s.rows):
        for i, act in enumerate(row):
            if act.kind in "GD":
                refused(
                    without(s, rank, i),
                    rf"rank {rank}: \d[GD]\d (gathers parameters that are there|drops param)|never drops",
                )


# ---- gathers ----


def fewest_gathers(stages, room):
    """By trying all choices: after each use, any of the stages that are whole may be kept."""
    best = {frozenset(): 0}
    for stage in stages:
        then = {}
        for held, count in best.items():
            there = held | {stage}
            for n in range(room + 1):
                for kept in map(frozenset, itertools.combinations(sorted(there), min(n, len(there)))):
                    then[kept] = min(then.get(kept, count + 1 - (stage in held)), count + (stage not in held))
        best = then
    return min(best.values())


def test_no_other_choice_gathers_less():
    for name, v, p, m in (("interleaved", 3, 2, 4), ("zb-v", 2, 2, 5), ("dualpipe-v", 2, 2, 4), ("1f1b", 1, 2, 4)):
        s = made(name, p, m, v)
        for room in range(v + 1):
            counted = pipeline.count_gathers(pipeline.with_gathers(s, room))
            for row, count in zip(s.rows, counted):
                assert count == fewest_gathers([act.stage for act in row if act.kind in "FBI"], room), (name, room)


@pytest.mark.parametrize(("name", "v"), CASES)
def test_gathers_are_counted_in_their_places(name, v):
    """Room for nothing streams all, room for all gathers once, and between no rank has more than its room."""
    p, m = 4, 16
    s = made(name, p, m, v)
    counts = [pipeline.count_gathers(pipeline.with_gathers(s, room)) for room in range(v + 1)]
    assert counts[0] == (2 * m * v,) * p and counts[v] == (v,) * p
    assert all(a >= b for more, fewer in itertools.pairwise(counts) for a, b in zip(more, fewer))
    for room in range(v + 1):
        gathered = pipeline.with_gathers(s, room)
        pipeline.check(gathered)
        assert pipeline.with_gathers(gathered, room) == gathered
        assert [[act for act in row if act.kind not in "GD"] for row in gathered.rows] == [[*row] for row in s.rows]
        for row in gathered.rows:
            held = [sum((a.kind == "G") - (a.kind == "D") for a in row[:i]) for i in range(len(row) + 1)]
            assert max(held) <= room and held[-1] == 0
    with pytest.raises(ValueError, match="room is -1"):
        pipeline.with_gathers(s, -1)


def test_gathers_take_the_time_that_they_are_given():
    s = pipeline.with_gathers(made("interleaved", 1, 2, 2), 1)
    gathers = sum(act.kind == "G" for act in s.rows[0])
    times = {"F": 1, "B": 2}
    assert gathers and play(s, times | {"G": 5}).step == play(s, times).step + 5 * gathers == 12 + 5 * gathers


def test_gathers_of_four_ranks_sixteen_micro_batches_and_two_chunks():
    counts = {n: pipeline.count_gathers(pipeline.with_gathers(made(n, 4, 16, v), 1)) for n, v in CASES if v == 2}
    assert counts == {
        "interleaved": (17, 27, 21, 9),
        "interleaved-zb": (27, 21, 15, 9),
        "zb-v": (24, 27, 30, 33),
        "dualpipe-v": (24, 27, 30, 33),
    }


# ---- text ----


@pytest.mark.parametrize(("name", "v"), CASES)
def test_a_schedule_comes_back_from_its_text(name, v):
    for p, m in ((1, 2), (2, 4), (3, 6), (11, 22)):
        s = made(name, p, m, v)
        assert pipeline.read_schedule(pipeline.write_schedule(s)) == s
        kept = pipeline.with_gathers(s, 1)
        assert pipeline.read_schedule(pipeline.write_schedule(kept)) == kept


TABLE = """name own
micro-batches 2
layers 0-2 3-4
rank 0: 0F0 0F1 0B0 0B1
rank 1: 1F0 1B0 1F1 1B1
"""


def test_a_table_may_be_written_in_several_ways():
    s = pipeline.read_schedule(TABLE)
    assert s.stages == Stages(((0, 1, 2), (3, 4)), (0, 1)) and (s.name, s.parts) == ("own", 2)
    plain = pipeline.read_schedule("# mine\n\n0F0,,0F1 , 0B0,0B1\n\t1F0 1B0 1F1 1B1 # last\n", costs=[1.0, 1.0, 3.0])
    assert plain.rows == s.rows and plain.stages.layers == ((0, 1), (2,)) and plain.parts == 2


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("1B0 1F1", "1B0 1H1", "line 5: rank 1: '1H1' is no act; write stage, kind (F, B, I, W, G, D, U) and "),
        ("1B0 1F1", "1B0 F1", "line 5: rank 1: 'F1' is no act"),
        ("1B0 1F1", "1B0 &1F1", "line 5: rank 1: '' is no act"),
        ("1B0 1F1", "1B0 1F²", "line 5: rank 1: '1F²' is no act"),
        ("0F1 0B0", "1F1 0B0", "line 5: rank 1 has 1F0, and stage 1 is on rank 0 (line 4)"),
        ("rank 1", "rank 2", "line 5: the row of rank 2 where that of rank 1 is due"),
        ("1F0 1B0 1F1 1B1", "", "line 5: rank 1 has no acts"),
        ("1F0 1B0 1F1 1B1", "2F0 2B0 2F1 2B1", "there are acts of stage 2 and none of stage 1"),
        ("0B0 0B1", "0B0", "line 4: rank 0 has no 0B1, the backward of micro-batch 1 in stage 0"),
        ("1B0 1F1", "1F1 1B0 1B0", "line 5: rank 1 has 1B0 twice"),
        ("0F0 0F1 0B0", "0F0 0B0 0F1", "line 4: it deadlocks: rank 0 waits at 0B0 for 1B0, rank 1 waits at 1F1"),
        ("micro-batches 2", "micro-batches 1", "line 4: rank 0: 0F1 is of micro-batch 1; they are 0 to 0"),
        ("micro-batches 2", "micro-batches two", "line 2: 'two' is no number of micro-batches"),
        ("micro-batches 2", "name other", "line 2: there is a line 'name' before this one"),
        ("0-2 3-4", "0-2 3;5", "line 3: '3;5' are no layers; write the first and last of a stage, such as 0-7"),
        ("0-2 3-4", "0-2 4", "line 4: the layers of its stages are not 0, 1, 2, ... in order, each once"),
        ("0-2 3-4", "0-2 3-2", "line 4: stage 1 has no layers"),
        ("0-2 3-4", "0-2", "line 4: layers are given for 1 stages, and ranks for 2"),
        ("layers 0-2 3-4", "", "there are 2 stages, and the model has 0 layers"),
        ("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1", "", "the text has no rows"),
    ],
)  # fmt: skip
def test_a_fault_of_a_table_names_line_rank_and_act(old, new, said):
    text = TABLE.replace(old, new)
    if "deadlocks" in said:
        text = text.replace("1F0 1B0 1F1 1B1", "1F0 1F1 1B0 1B1")
    assert text != TABLE
    with pytest.raises(ValueError) as error:
        pipeline.read_schedule(text)
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_any_text_is_a_schedule_or_one_line():
    draw, read = random.Random(5), 0
    for _ in range(400):
        text = [*TABLE]
        for _ in range(draw.randint(1, 3)):
            i = draw.randrange(len(text))
            text[i : i + draw.randint(0, 3)] = draw.choice(
                ["", " ", "\n", ":", "&", "-", "0", "7", "F", "1B0", "rank 1:"]
            )
        try:
            pipeline.check(pipeline.read_schedule("".join(text)))
            read += 1
        except ValueError as error:
            assert str(error) and "\n" not in str(error)
    assert 5 < read < 200


def test_a_drawing_has_every_act_at_its_time():
    s = made("zb-h1", 2, 3, 1)
    assert str(s).splitlines() == [
        "zb-h1: 2 ranks, 2 stages, 3 micro-batches",
        "       0  1  2  3  4  5  6  7  8  9",
        "rank 0 F0 F1    I0 W0 F2 I1 W1 I2 W2",
        "rank 1    F0 I0 F1 I1 W0 F2 I2 W1 W2",
    ]
    long = str(made("zb-v", 4, 32, 2)).splitlines()
    assert max(map(len, long)) <= 120
    words = " ".join(long).split()
    assert all(words.count(str(act)) == 1 for row in made("zb-v", 4, 32, 2).rows for act in row)


def test_the_page_shows_what_its_examples_print(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page, namespace, compared = ROOT / "docs" / "pipeline.md", {"__name__": "__docs__"}, 0
    blocks = blocks_of(page)
    for block, shown in itertools.zip_longest(blocks, blocks[1:]):
        if block.kind == "python":
            run_python(block, page, namespace)
            printed = capsys.readouterr().out
            assert printed == (shown.code if shown and shown.kind == "text" else ""), f"{page.name}:{block.line}"
            compared += bool(printed)
    assert compared >= 8 and (tmp_path / "zb-v.svg").is_file()


def test_a_picture_has_a_bar_for_every_act_and_is_the_same_every_time():
    s = pipeline.with_gathers(made("dualpipe-v", 2, 4, 2), 1)
    played = play(s, {"F": 0.01, "I": 0.02, "W": 0.01})
    figure = schedule_bars(s, played.start, played.end)
    bars = [path.get_extents() for bars in figure.axes[0].collections for path in bars.get_paths()]
    assert len(bars) == sum(act.kind in "FBIW" for row in s.rows for act in row)
    drawn = sorted((round(bar.y0 + 0.4), round(bar.x0, 6), round(bar.x1, 6)) for bar in bars)
    times = [zip(row, *of) for row, *of in zip(s.rows, played.start, played.end)]
    wanted = [
        (r, round(1e3 * a, 6), round(1e3 * b, 6))
        for r, row in enumerate(times)
        for k, a, b in row
        if k.kind not in "GD"
    ]
    assert drawn == sorted(wanted)
    one, again = (figures.svg(lambda: schedule_bars(s, played.start, played.end)) for _ in range(2))
    assert one == again and "backward by weights" in one


# ---- stages ----


def rate(counts, costs, ranks):
    """What a layout minimises: the longest stage, then the layers of early ranks."""
    ends = [*itertools.accumulate(counts)]
    longest = max(math.fsum(costs[end - n : end]) for n, end in zip(counts, ends))
    return round(longest, 9), sum((max(ranks) + 1 - rank) * n for rank, n in zip(ranks, counts))


def test_a_layout_has_the_shortest_longest_stage_and_then_few_layers_on_early_ranks():
    draw = random.Random(3)
    for p, v, placement in ((1, 1, "loop"), (3, 1, "loop"), (2, 2, "loop"), (2, 2, "v"), (5, 1, "loop")):
        for _ in range(12):
            n = draw.randint(p * v, 8)
            costs = [draw.choice((1.0, 2.0, draw.random())) for _ in range(n)]
            embed, head = draw.choice((0.0, 1.5)), draw.choice((0.0, 2.5))
            stages = pipeline.layout(costs, p, v, placement, embed, head)
            ranks = stage_ranks(p, v, placement)
            assert stages.ranks == ranks and [i for layers in stages.layers for i in layers] == list(range(n))
            whole = [c + embed * (i == 0) + head * (i == n - 1) for i, c in enumerate(costs)]
            cuts = ((0, *ends, n) for ends in itertools.combinations(range(1, n), p * v - 1))
            every = [[b - a for a, b in itertools.pairwise(ends)] for ends in cuts]
            assert rate([len(layers) for layers in stages.layers], whole, ranks) == min(
                rate(counts, whole, ranks) for counts in every
            )


def test_an_even_model_is_cut_evenly_and_a_head_takes_layers_from_its_stage():
    def counts(stages):
        return [len(layers) for layers in stages.layers]

    assert counts(pipeline.layout([1.0] * 32, 4)) == [8, 8, 8, 8]
    assert counts(pipeline.layout([1.0] * 32, 4, head=2.5)) == [8, 9, 9, 6]
    assert pipeline.read_layout("8,9, 9,6", [1.0] * 32, 4) == pipeline.layout([1.0] * 32, 4, head=2.5)
    assert pipeline.read_layout("auto", [1.0] * 32, 4) == pipeline.layout([1.0] * 32, 4)
    assert pipeline.read_layout("auto", [1.0] * 8, 2, 2, "v") == pipeline.layout([1.0] * 8, 2, 2, "v")


BAD = {
    "pp=4 with 2 chunks a rank has 8 stages, and the model has 6 layers": lambda: pipeline.layout([1.0] * 6, 4, 2),
    "the number of ranks of pp is 0": lambda: pipeline.layout([1.0], 0),
    "the cost of layer 1 is -1.0": lambda: pipeline.layout([1.0, -1.0], 1),
    "the cost of the head is nan": lambda: pipeline.layout([1.0] * 2, 1, head=math.nan),
    "no placement 'w' of stages; it must be loop or v": lambda: stage_ranks(2, 2, "w"),
    "8,9,9 has 26 layers in 3 stages; the model has 32": lambda: pipeline.read_layout("8,9,9", [1.0] * 32, 4),
    "layout '3,-1': '-1' is no number of layers": lambda: pipeline.read_layout("3,-1", [1.0] * 2, 2),
    "'0' is no number of layers; write auto, or such as": lambda: pipeline.read_layout("2,0", [1.0] * 2, 2),
    "no time for B; schedule 1f1b needs those of B, F": lambda: play(made("1f1b", 2, 2, 1), {"F": 1.0}),
    "the time of F is given by 1 numbers; give one for all, or 2": lambda: play(
        made("1f1b", 2, 2, 1), {"F": [1.0], "B": 2.0}
    ),
    "the time of messages is given by 2 numbers": lambda: play(made("1f1b", 2, 2, 1), {"F": 1, "B": 2}, [1.0, 1.0]),
}


@pytest.mark.parametrize("said", BAD)
def test_bad_values_are_one_line(said):
    with pytest.raises(ValueError) as error:
        BAD[said]()
    assert said in str(error.value) and "\n" not in str(error.value)
