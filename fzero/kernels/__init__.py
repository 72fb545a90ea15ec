"""The hot operations, one file each: the formula, the reference that defines the result, and faster forms."""
