"""Communication between ranks: differentiable collectives, the messages below them, the ledger of bytes sent, the
agreement check.
"""
