"""Foundations that extend torch: trees, random keys, transforms, compilation, dtypes, storage. Imports nothing about
ranks or models.
"""
