"""Schedules for tests: over stages of one layer each."""

from fzero.sharding import FAMILIES, Stages, group_size, pipeline, stage_ranks

CASES = [(name, v) for name, family in FAMILIES.items() for v in ([family.chunks] if family.chunks else [1, 2, 3, 4])]


def stages_of(p, v, placement):
    return Stages(tuple((i,) for i in range(p * v)), stage_ranks(p, v, placement))


def made(name, p, m, v):
    return pipeline.schedule(name, stages_of(p, v, FAMILIES[name].placement), m)


def serves(name, p, m, v):
    """Whether a schedule takes so many micro-batches."""
    family = FAMILIES[name]
    return m >= family.min_parts(p) and (not family.groups or v == 1 or group_size(p, m) > 0)
