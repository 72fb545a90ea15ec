"""What a long command says on stderr of its stage and time."""

import io
import threading

import pytest

from fzero.cli import process


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_file_gets_whole_lines_and_a_terminal_one_that_is_rewritten():
    now = [100.0]
    for stream, expected in (
        (io.StringIO(), "fzero: tracing (0 s)\nfzero: simulating (12 s)\n"),
        (Terminal(), "\r\x1b[Kfzero: tracing (0 s)\r\x1b[Kfzero: simulating (12 s)"),
    ):
        now[0] = 100.0
        show = process.Progress("tracing", stream=stream, clock=lambda: now[0])
        show.draw()
        now[0] = 112.0
        show("simulating")
        show.draw()
        assert stream.getvalue() == expected


def test_a_long_stage_is_cut_to_the_terminal_s_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    process.Progress("tracing 4 of 126 layers", stream=stream).draw()
    assert stream.getvalue() == "\r\x1b[Kfzero: tracing 4 of"


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_it_draws_while_the_command_works_and_leaves_no_line_on_a_terminal(kind, monkeypatch):
    monkeypatch.setattr(process, "EVERY", 0.001)
    monkeypatch.setattr(process, "REDRAWN", 0.001)
    drawn = threading.Event()

    class Stream(kind):
        def write(self, text):
            drawn.set()
            return super().write(text)

    stream = Stream()
    with process.Progress("tracing", stream=stream):
        assert drawn.wait(60)
    text = stream.getvalue()
    assert "fzero: tracing (" in text and text.endswith("\r\x1b[K" if kind is Terminal else "s)\n")


def test_a_short_command_writes_nothing_to_a_file_and_a_reader_that_has_gone_is_no_error():
    stream = io.StringIO()
    with process.Progress("tracing", stream=stream):
        pass
    assert stream.getvalue() == ""
    show = process.Progress("tracing", stream=stream)
    stream.close()
    show.draw()
    assert show.ended.is_set()
