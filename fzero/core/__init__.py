"""Foundations on the level of torch: trees, keys, transforms, compilation, dtypes, storage. Knows no ranks and no
models.
"""
