"""Communication between ranks: collectives, the messages below them, the ledger of bytes, the agreement check."""
