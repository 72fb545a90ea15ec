"""Ranks talking: collectives as linear maps, the messages below them, the ledger of bytes, agreement."""
