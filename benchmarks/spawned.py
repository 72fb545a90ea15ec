"""A function on several processes of this machine, each a rank, and what the last of them answers."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from turns import free_port


def answer_of_ranks(work: Callable[[int, dict[str, Any], int, Connection], None], order: dict[str, Any]) -> Any:
    """What the last of `order["ranks"]` processes sends, each of which runs `work(rank, order, port, connection)`.

    Raises ValueError if it ends without an answer.
    """
    context, port = multiprocessing.get_context("spawn"), free_port()
    ends = [context.Pipe(duplex=False) for _ in range(order["ranks"])]
    processes = [context.Process(target=work, args=(rank, order, port, there)) for rank, (_, there) in enumerate(ends)]
    for process in processes:
        process.start()
    for _, there in ends:
        there.close()  # so that a rank that ends is seen
    try:
        return [here.recv() for here, _ in ends][-1]
    except EOFError as error:
        raise ValueError("a rank ended without an answer; its error is above") from error
    finally:
        for process in processes:
            process.join(10.0)
            process.kill()
