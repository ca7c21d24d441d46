"""Requests drawn from the server's own OpenAPI document: no 500, no hang, no answer outside the document."""

import pytest

import servers


@pytest.mark.slow  # other requests in every run: a find must not turn an unrelated change red
def test_drawn_requests():
    statuses = servers.draw_requests(seconds=45)
    assert not [status for status in statuses if status >= 500]
    assert statuses.count(200) >= 10 and statuses.count(400) >= 50, "valid and invalid ones were drawn"
