"""The hot operations, one file each: the formula, the reference that defines it, and the forms that are fast."""
