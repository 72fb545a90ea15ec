"""Every second page of the documents: each of these files is one worker's, and all pages together are minutes."""

import pytest
from test_docs import PAGES, each_page, run_page


@each_page(PAGES[1::2])
def test_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    left_out = run_page(page, tmp_path)
    if left_out:
        pytest.skip("; ".join(left_out))
